// What a person gives the explorer: text from the field, or a file that is picked or dropped anywhere on the page. What
// it is, and whether it is any good, is for Python to say.

function element(name, classes, parent, attributes = {}) {
  const made = document.createElement(name);
  made.className = classes;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.dataset.lmSuppressShortcuts = "true";
  parent.append(made);
  return made;
}

function send(model, text, name) {
  const length = model.get("piece_letters");
  const count = Math.max(1, Math.ceil(text.length / length));
  for (let number = 0; number < count; number++) {
    const piece = text.slice(number * length, (number + 1) * length);
    model.send({ name, number, text: piece, is_last: number === count - 1 });
  }
}

async function take(model, file) {
  if (!file) return;
  if (file.size > model.get("most_nbytes")) model.send({ name: file.name, nbytes: file.size });
  else send(model, await file.text(), file.name);
}

function render({ model, el }) {
  const heading = element("button", "zeroviz-heading", el, { type: "button", "aria-expanded": "false" });
  const body = element("div", "zeroviz-intake-body", el, { hidden: "" });
  const say = () => (heading.textContent = `${body.hidden ? "▸" : "▾"} ${model.get("heading")}`);
  heading.addEventListener("click", () => {
    body.hidden = !body.hidden;
    heading.setAttribute("aria-expanded", String(!body.hidden));
    say();
  });
  const field = element("textarea", "zeroviz-intake-text", body, { rows: 3, spellcheck: "false" });
  const row = element("div", "zeroviz-intake-row", body);
  const use = element("button", "zeroviz-step", row, { type: "button" });
  const picker = element("input", "zeroviz-intake-file", row, { type: "file", accept: ".json" });
  const words = () => {
    field.placeholder = model.get("hint");
    field.setAttribute("aria-label", model.get("hint"));
    picker.setAttribute("aria-label", "a config.json or a trace from this computer");
    use.textContent = model.get("use");
    say();
  };
  words();
  use.addEventListener("click", () => send(model, field.value, ""));
  field.addEventListener("keydown", (event) => {
    event.stopPropagation(); // the notebook would take letters for commands
    if (event.key === "Enter" && !event.shiftKey && !field.value.includes("\n")) {
      event.preventDefault();
      send(model, field.value, "");
    }
  });
  picker.addEventListener("change", async () => {
    await take(model, picker.files[0]);
    picker.value = "";
  });
  const emptied = () => (field.value = "");
  model.on("change:taken", emptied);
  model.on("change:heading change:hint change:use", words);

  // The page is there only after this view is in it.
  const drops = new AbortController();
  requestAnimationFrame(() => {
    const page = el.closest(".zeroviz-explorer") ?? el;
    const options = { signal: drops.signal };
    page.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      page.classList.add("zeroviz-dropping");
    }, options);
    for (const end of ["dragleave", "drop"])
      page.addEventListener(end, () => page.classList.remove("zeroviz-dropping"), options);
    page.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      event.stopPropagation();
      take(model, event.dataTransfer.files[0]);
    }, options);
  });
  return () => {
    drops.abort();
    model.off("change:taken", emptied);
    model.off("change:heading change:hint change:use", words);
  };
}

export default { render };
