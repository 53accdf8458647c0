// The advice as Python wrote it; a press on a change tells Python which.

function render({ model, el }) {
  const heading = document.createElement("button");
  heading.type = "button";
  heading.className = "zeroviz-heading";
  heading.dataset.lmSuppressShortcuts = "true";
  const body = document.createElement("div");
  el.append(heading, body);
  const draw = () => {
    const open = model.get("is_open");
    heading.textContent = `${open ? "▾" : "▸"} ${model.get("heading")}`;
    heading.setAttribute("aria-expanded", String(open));
    body.hidden = !open;
    body.innerHTML = model.get("html");
    for (const button of body.querySelectorAll("button")) button.dataset.lmSuppressShortcuts = "true";
  };
  heading.addEventListener("click", () => {
    model.set("is_open", !model.get("is_open"));
    model.save_changes();
    draw();
  });
  body.addEventListener("click", (event) => {
    const change = event.target.closest("[data-toggles]");
    if (change) model.send({ toggles: change.dataset.toggles });
  });
  model.on("change", draw);
  draw();
  return () => model.off("change", draw);
}

export default { render };
