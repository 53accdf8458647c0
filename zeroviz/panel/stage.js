// The pictures of the explorer, and the moment of the step that they all show.
//
// Python lays the pictures out and sends each as one SVG text, with the places in it that a moment needs: where a frame
// of the film lies on the timeline, where a number of bytes lies on the bars, where a unit lies on the map. What a
// moment changes is drawn over them here, so that moving through the step asks the kernel for nothing. Nothing here
// computes a number but `amount`, which says bytes as zeroviz/axis.py does.

const SVG = "http://www.w3.org/2000/svg";
const PICTURES = ["bars", "map", "film", "wire", "formula"];
const PICTURE_OF = { map: "map", timeline: "film", wire: "wire", formula: "formula" };
const SCALES = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, PB: 1e15, EB: 1e18 };
const SAVE_MS = 250;
const REST_MS = 150;
const SIZES = [5, 4.4, 3.8, 3.4, 3, 2.7]; // of a formula over the whole window, in hundredths of its height

export function amount(nbytes, unit) {
  if (Math.abs(nbytes) * 10 < (SCALES[unit] ?? 1))
    unit = Object.keys(SCALES).findLast((each) => Math.abs(nbytes) >= SCALES[each]) ?? "B";
  const scale = SCALES[unit] ?? 1;
  if (scale === 1) return `${nbytes.toLocaleString("en-US")} B`;
  const value = nbytes / scale;
  if (Math.abs(value) >= 999.95) return `${Math.round(value).toLocaleString("en-US")} ${unit}`;
  return `${value.toPrecision(4)} ${unit}`;
}

function element(name, classes, parent, attributes = {}) {
  const made = document.createElement(name);
  made.className = classes;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function mark(name, parent, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

// A line of the moment's, unless it is drawn so already.
function trace(line, path) {
  if (line && line.getAttribute("d") !== path) line.setAttribute("d", path);
}

// Words, unless they stand there already: the same ones put anew would be laid out anew.
function put(holder, words) {
  if (holder.textContent !== words) holder.textContent = words;
}

// Make `old` what `fresh` is and touch only what differs: from state to state most of a picture's words stay, and to lay
// all of them out anew takes longer than everything else together.
function become(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.attributes.length > fresh.attributes.length)
    for (const { name } of [...old.attributes]) // what the reader has opened stays open
      if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  let [before, after] = [old.firstChild, fresh.firstChild];
  while (before && after) {
    const [later, next] = [before.nextSibling, after.nextSibling];
    become(before, after);
    [before, after] = [later, next];
  }
  while (before) {
    const later = before.nextSibling;
    before.remove();
    before = later;
  }
  while (after) {
    const next = after.nextSibling;
    old.append(after);
    after = next;
  }
}

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

function show(card, content) {
  const [old, fresh] = [card.firstChild, content.firstChild];
  if (old && fresh) become(old, fresh);
  else card.replaceChildren(content);
}

// The first place of an ascending list that is beyond x.
function first(list, x) {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

// Where in the step a frame of a film stands: at rest, at the peak, at the end, or in which op of how many alike, and
// what share of its phase is over.
export function placeOf(frames, number) {
  const last = frames.words.length - 1;
  if (number <= 0) return { at: "rest" };
  if (number === frames.peak) return { at: "peak" };
  if (number >= last) return { at: "end" };
  const op = frames.ops[frames.at[number]];
  const alike = ends(frames, frames.at[number]);
  const phase = within(frames, op[0]);
  return { at: "op", op, turn: first(alike, number - 1), share: phase.indexOf(number) / Math.max(1, phase.length - 1) };
}

// The frame of another film at that place: the same op or, where it has none such, as far into the same phase.
export function frameAt(frames, { at, op, turn, share }) {
  const last = frames.words.length - 1;
  if (at !== "op") return { rest: 0, peak: frames.peak, end: last }[at];
  const same = frames.ops.findIndex((other) => other.every((word, place) => word === op[place]));
  const alike = same < 0 ? [] : ends(frames, same);
  if (alike.length) return alike[Math.min(turn, alike.length - 1)];
  const phase = within(frames, op[0]);
  return phase.length ? phase[Math.round(share * (phase.length - 1))] : Math.round(share * last);
}

// The frames at the end of an op each time that it is done: one at the peak within it comes before its end.
function ends({ at }, op) {
  return [...at.keys()].filter((number) => at[number] === op && at[number + 1] !== op);
}

function within({ at, ops }, phase) {
  return [...at.keys()].filter((number) => ops[at[number]][0] === phase);
}

class Stage {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.cards = {};
    this.overlays = {};
    this.texts = {};
    this.data = {};
    this.numAsked = 0;
    root.classList.add("zeroviz-stage");
    this.card("bars", root);
    for (const [name, picture] of Object.entries(PICTURE_OF)) this.card(picture, this.section(name));
    this.player();
    this.presenter();
    this.lights();
    this.watch();
    this.changed = () => this.draw();
    // A move is saved a moment later; meanwhile the page's own cursor is the newer one.
    this.moved = () => {
      if (this.cursor !== model.get("cursor")) this.place = null;
      this.cursor = model.get("cursor");
    };
    this.moved();
    model.on("change:cursor", this.moved);
    model.on("change", this.changed);
    this.resized = () => {
      this.measure();
      if (this.isPresenting) this.present(this.presented);
    };
    window.addEventListener("resize", this.resized);
    this.told = (message) => message.ahead && this.keep(message);
    model.on("msg:custom", this.told);
    this.listen();
    this.draw();
    this.measure(); // a page that was closed while it presented
    this.shown = true;
  }

  // ---- what stands on the page ----

  card(name, parent) {
    this.cards[name] = element("div", `zeroviz-picture-card zeroviz-${name}-card`, parent);
  }

  section(name) {
    const section = element("section", `zeroviz-section zeroviz-${name}-section`, this.root);
    const heading = element("button", "zeroviz-heading", section, { type: "button", "data-part": name });
    heading.dataset.lmSuppressShortcuts = "true";
    heading.addEventListener("click", () => this.open(name, !this.model.get("is_open")[name]));
    section.heading = heading;
    this.sections = { ...this.sections, [name]: section };
    return section;
  }

  open(name, is_open = true) {
    const before = this.model.get("is_open");
    if (!(name in before) || before[name] === is_open) return;
    this.model.set("is_open", { ...before, [name]: is_open });
    this.model.save_changes();
    this.fold();
  }

  fold() {
    for (const [name, section] of Object.entries(this.sections)) {
      const open = this.model.get("is_open")[name];
      put(section.heading, `${open ? "▾" : "▸"} ${this.model.get("headings")[name]}`);
      section.heading.setAttribute("aria-expanded", String(open));
      section.classList.toggle("zeroviz-closed", !open);
    }
  }

  player() {
    const film = this.cards.film;
    const bar = element("div", "zeroviz-player", film.parentElement);
    this.sections.timeline.insertBefore(bar, film);
    const button = (words, label, act) => {
      const made = element("button", "zeroviz-step", bar, { type: "button", "aria-label": label, title: label });
      made.dataset.lmSuppressShortcuts = "true";
      made.textContent = words;
      if (words in this.model.get("labels")) this.named = { ...this.named, [words]: made };
      made.addEventListener("click", act);
      return made;
    };
    button("rest", "to rest, before the step (Home)", () => this.go(0));
    button("◀", "one op back (left arrow)", () => this.go(this.cursor - 1));
    button("▶", "one op on (right arrow or space)", () => this.go(this.cursor + 1));
    button("end", "to the end of the step (End)", () => this.go(Infinity));
    button("peak", "to the op that holds the peak (P)", () => this.go(this.frames.peak));
    this.slider = element("input", "zeroviz-cursor", bar, { type: "range", min: 0, step: 1, "aria-label": "op of the step" });
    this.slider.dataset.lmSuppressShortcuts = "true";
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.slider.addEventListener("keydown", (event) => this.key(event));
    this.words = element("p", "zeroviz-now", this.sections.timeline, { "aria-live": "polite" });
    this.held = element("p", "zeroviz-now-held", this.sections.timeline);
    film.before(this.words, this.held);
    film.tabIndex = 0;
    film.dataset.lmSuppressShortcuts = "true";
    film.setAttribute("role", "group");
    film.setAttribute("aria-label", "The step; arrow keys, space, Home and End move through it");
    film.addEventListener("keydown", (event) => this.key(event));
    const point = (event) => this.go(this.nearest(event));
    film.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      film.setPointerCapture(event.pointerId);
      film.addEventListener("pointermove", point);
      point(event);
    });
    for (const end of ["pointerup", "pointercancel"])
      film.addEventListener(end, () => film.removeEventListener("pointermove", point));
    this.tip = element("div", "zeroviz-tip", this.root, { role: "tooltip", hidden: "" });
    film.addEventListener("pointermove", (event) => this.tell(event));
    film.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  // The tooltip of the op under the pointer: at once, and not as small as a browser's own.
  tell(event) {
    const { tips, ends, top, bottom } = this.data.film;
    const box = this.cards.film.querySelector("svg")?.getScreenCTM();
    const x = box ? (event.clientX - box.e) / box.a : NaN;
    const y = box ? (event.clientY - box.f) / box.d : NaN;
    const number = ends && y >= top && y <= bottom ? first(ends, x) : ends?.length;
    this.tip.hidden = !(number < ends?.length) || x < this.data.film.left;
    if (this.tip.hidden) return;
    this.tip.textContent = tips[number];
    const room = this.root.getBoundingClientRect();
    const left = Math.min(event.clientX - room.left + 14, room.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${event.clientY - room.top + 18}px`;
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    let to = null;
    if (event.key in steps) to = this.cursor + steps[event.key];
    else if (event.key === " ") to = this.cursor + (event.shiftKey ? -1 : 1);
    else if (event.key === "Home") to = 0;
    else if (event.key === "End") to = Infinity;
    else if (event.key === "p" || event.key === "P") to = this.frames.peak;
    if (to === null) return;
    event.preventDefault();
    event.stopPropagation();
    this.go(to);
  }

  nearest(event) {
    const svg = this.cards.film.querySelector("svg");
    const box = svg.getScreenCTM();
    const x = (event.clientX - box.e) / box.a;
    const xs = this.data.film.xs;
    const high = Math.min(first(xs, x), xs.length - 1);
    const low = Math.max(0, high - 1);
    return x - xs[low] <= xs[high] - x ? low : high;
  }

  // ---- what is in the window is drawn first, the rest when the page has nothing else to do ----

  watch() {
    const visible = new Set();
    this.watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) visible.add(target.dataset.picture);
        else visible.delete(target.dataset.picture);
      }
      const seen = PICTURES.filter((name) => visible.has(name));
      if (JSON.stringify(seen) === JSON.stringify(this.model.get("seen"))) return;
      this.model.set("seen", seen);
      this.model.save_changes();
      this.forget(); // it was drawn for what was in sight before
      this.rest();
    });
    for (const name of PICTURES) {
      this.cards[name].dataset.picture = name;
      this.watcher.observe(this.cards[name]);
    }
  }

  // When the page has rested: what is out of sight; then, when that is there, what is one step ahead.
  rest() {
    clearTimeout(this.resting);
    const version = this.model.get("version");
    const is_due = this.model.get("has_due");
    if (!is_due && (!this.last || this.ahead || !this.model.get("seen")?.length)) return;
    this.resting = setTimeout(() => {
      if (is_due) return void this.model.send({ rest: true });
      const { toggle, slider, way } = this.last;
      const index = slider.get("index");
      this.numAsked += 1;
      this.ahead = { number: this.numAsked, toggle, version, pictures: {}, places: [index + way, index - way] };
      this.ask();
    }, REST_MS);
  }

  forget() {
    this.ahead = null;
    delete this.root.dataset.ahead;
  }

  // ---- a slider's next step is drawn before it is made, and shown before the kernel has answered ----

  listen() {
    this.sliders = [];
    this.typed = (event) => this.type(event);
    for (const kind of ["focusout", "keydown"]) document.addEventListener(kind, this.typed, true);
    for (const [toggle, id] of Object.entries(this.model.get("sliders")))
      this.model.widget_manager.get_model(id).then((slider) => {
        const moved = (_, index, { updated_view } = {}) => {
          if (!updated_view) return; // by the kernel
          this.last = { toggle, slider, way: index < slider.previous("index") ? -1 : 1 };
          // Not in the slider's way: it has yet to tell the kernel.
          queueMicrotask(() => this.leap(toggle, index));
        };
        slider.on("change:index", moved);
        this.sliders.push([toggle, slider, moved]);
        if (toggle !== "ranks" || this.last) return;
        this.last = { toggle, slider, way: 1 };
        this.rest();
      }, () => {}); // a saved page that has lost the slider: there is no kernel to be ahead of
  }

  // A number typed beside a slider, which ipywidgets does not read. The kernel takes it or says why not; until it has,
  // the slider's own number stands there.
  type(event) {
    const field = event.target.closest?.(".widget-readout");
    const control = field?.closest(".zeroviz-controls > *");
    if (!control || !this.root.closest(".zeroviz-explorer")?.contains(field)) return;
    const found = this.sliders.find(([toggle]) => control.classList.contains(`zeroviz-${toggle.replaceAll("_", "-")}`));
    if (!found || (event.type === "keydown" && (event.key !== "Enter" || event.shiftKey))) return;
    const [toggle, slider] = found;
    const [text, said] = [field.textContent.trim(), slider.get("_options_labels")[slider.get("index")]];
    if (event.type === "keydown") event.preventDefault();
    field.textContent = said;
    if (text !== said) this.model.send({ typed: text, toggle });
  }

  // One place at a time, so that a move meanwhile waits for one at most; first the one that the last move went towards.
  ask() {
    const { number, toggle, version, places } = this.ahead;
    if (places.length) this.model.send({ ahead: number, toggle, version, at: [places.shift()] });
    else this.root.dataset.ahead = `${toggle} ${version} ${this.model.get("seen").join(" ")}`;
  }

  keep({ number, ahead }) {
    if (this.ahead?.number !== number) return;
    const read = ([name, text]) => {
      const data = JSON.parse(text);
      return [name, { data, content: parsed(data.svg ?? "") }];
    };
    for (const [place, texts] of Object.entries(ahead)) this.ahead.pictures[place] = Object.entries(texts).map(read);
    this.ask();
  }

  leap(toggle, index) {
    const { ahead } = this;
    const found = ahead?.toggle === toggle && ahead.version === this.model.get("version") && ahead.pictures[index];
    this.forget();
    if (!found) return;
    for (const [name, { data, content }] of found) {
      this.texts[name] = null;
      if (PICTURES.includes(name)) this.lay(name, data, content);
      else this.data[name] = data;
    }
    this.follow();
    this.root.dataset.leapt = `${toggle} ${ahead.version}`;
  }

  // ---- a term of the formula lights what it stands for in the bars and the film ----

  lights() {
    const { formula } = this.cards;
    const at = (event) => this.light(event.target.closest?.(".zeroviz-term")?.dataset.category ?? "");
    for (const kind of ["pointerover", "focusin"]) formula.addEventListener(kind, at);
    for (const kind of ["pointerleave", "focusout"]) formula.addEventListener(kind, () => this.light(""));
  }

  light(categories) {
    const lit = new Set(categories.split(" ").filter(Boolean));
    for (const name of ["bars", "film"]) {
      const svg = this.cards[name].querySelector("svg");
      svg?.classList.toggle("zeroviz-lighting", lit.size > 0);
      for (const part of svg?.querySelectorAll("[data-category]") ?? [])
        part.classList.toggle("zeroviz-lit", lit.has(part.dataset.category));
    }
  }

  // ---- for a lecture: one picture at a time, over the whole window ----

  presenter() {
    const bar = element("div", "zeroviz-present-bar", this.root);
    this.root.prepend(bar);
    const start = element("button", "zeroviz-step zeroviz-present", bar, { type: "button" });
    start.dataset.lmSuppressShortcuts = "true";
    this.named = { ...this.named, Present: start };
    start.title = "One picture at a time, over the whole window";
    start.addEventListener("click", () => this.present(0));
    this.help = element("p", "zeroviz-present-help", this.root);
    this.blank = element("div", "zeroviz-blank", this.root, { "aria-label": "blank screen; B brings the picture back" });
    this.root.addEventListener("keydown", (event) => this.presenterKey(event), true);
  }

  get isPresenting() {
    return this.root.classList.contains("zeroviz-presenting");
  }

  present(number) {
    if (this.putQuestion()) return;
    const pictures = ["bars", ...Object.values(PICTURE_OF)];
    this.presented = Math.min(Math.max(0, number), pictures.length - 1);
    this.open(Object.keys(PICTURE_OF)[this.presented - 1]);
    if (!this.isPresenting) {
      this.root.classList.add("zeroviz-presenting");
      // Into the top layer: the notebook clips what is only fixed.
      this.root.popover = "manual";
      this.root.showPopover();
      this.root.tabIndex = -1;
      this.root.focus();
      this.measure();
    }
    for (const name of PICTURES) {
      const holder = name === "bars" ? this.cards.bars : this.cards[name].parentElement;
      holder.classList.toggle("zeroviz-presented", name === pictures[this.presented]);
    }
    this.root.dataset.presented = pictures[this.presented];
    const keys = pictures.map((name, place) => `${place + 1} ${name}`).join(" · ");
    this.help.textContent =
      `${keys} · page keys: next · arrows, space: the step · S strategy · + and - ranks · U undo · B blank · Esc`;
    if (pictures[this.presented] === "formula") this.fit();
  }

  // The formulas as large as lets all of them into the window, but never too small for the last row: then they scroll.
  fit() {
    const { formula } = this.cards;
    for (const size of SIZES) {
      formula.style.setProperty("--zv-size", `${size}vh`);
      if (formula.scrollHeight <= formula.clientHeight) return;
    }
  }

  // Through the formulas by keys; those that go along the step stay with it.
  scroll({ key, shiftKey }) {
    const { formula } = this.cards;
    const page = formula.clientHeight;
    const ways = { ArrowDown: 0.15, ArrowUp: -0.15, " ": shiftKey ? -0.85 : 0.85, Home: -Infinity, End: Infinity };
    if (this.root.dataset.presented !== "formula" || !(key in ways)) return false;
    formula.scrollTop = Math.min(Math.max(0, formula.scrollTop + ways[key] * page), formula.scrollHeight);
    return true;
  }

  // A question that hides the pictures is what comes over the window, and then its answer; from there it goes on to
  // the pictures.
  putQuestion() {
    const explorer = this.root.closest(".zeroviz-explorer");
    const guess = explorer?.querySelector(".zeroviz-guess");
    if (!guess || !explorer.classList.contains("zeroviz-guessing")) return false;
    if (this.toQuestion) return true; // it is there
    if (this.isPresenting) this.leave();
    guess.popover = "manual";
    guess.showPopover();
    guess.tabIndex = -1;
    guess.focus();
    // Wherever the focus is: a choice that was pressed is gone.
    this.toQuestion = (event) => {
      const isTyped = event.target.matches?.("input, select");
      const isAnswered = !explorer.classList.contains("zeroviz-guessing");
      const isOn = !isTyped && isAnswered && (event.key === "PageDown" || event.key === " ");
      if (event.key !== "Escape" && !isOn) return;
      event.preventDefault();
      event.stopPropagation();
      this.leaveQuestion(guess);
      if (isOn) this.present(0);
      else this.root.querySelector(".zeroviz-present").focus();
    };
    document.addEventListener("keydown", this.toQuestion, true);
    return true;
  }

  // Pictures are laid out for the window that they have to themselves.
  measure() {
    const aspect = this.isPresenting ? Math.round((100 * innerWidth) / (0.94 * innerHeight)) / 100 : 0;
    if (aspect === this.model.get("aspect")) return;
    this.model.set("aspect", aspect);
    this.model.save_changes();
  }

  leaveQuestion(guess) {
    document.removeEventListener("keydown", this.toQuestion, true);
    this.toQuestion = null;
    guess.hidePopover();
    guess.popover = null;
  }

  leave() {
    this.root.classList.remove("zeroviz-presenting", "zeroviz-blanked");
    this.root.hidePopover();
    this.root.popover = null;
    delete this.root.dataset.presented;
    this.measure();
    this.root.querySelector(".zeroviz-present").focus();
  }

  presenterKey(event) {
    if (!this.isPresenting || event.ctrlKey || event.altKey || event.metaKey) return;
    const turns = { PageDown: 1, PageUp: -1 };
    const asks = { s: "strategy", S: "strategy back", "+": "more ranks", "=": "more ranks", "-": "fewer ranks", u: "undo" };
    const isBlank = this.root.classList.contains("zeroviz-blanked");
    if (event.key === "Escape") this.leave();
    else if (isBlank) this.root.classList.remove("zeroviz-blanked"); // and nothing else unseen
    else if (event.key === "b" || event.key === "B" || event.key === ".") this.root.classList.add("zeroviz-blanked");
    else if (event.key in turns) this.present(this.presented + turns[event.key]);
    else if (event.key >= "1" && event.key <= "9") this.present(Number(event.key) - 1);
    else if (event.key in asks) this.model.send({ ask: asks[event.key] });
    else if (!this.scroll(event)) return void this.key(event);
    event.preventDefault();
    event.stopPropagation();
  }

  // ---- a new picture ----

  // What Python sent as one text; whether it is another one than before.
  read(name) {
    const text = this.model.get(name);
    if (text === this.texts[name]) return false;
    this.texts[name] = text;
    this.data[name] = JSON.parse(text);
    return true;
  }

  lay(name, data, content) {
    this.data[name] = data;
    this.overlays[name]?.remove();
    this.overlays[name] = null;
    show(this.cards[name], content);
  }

  draw() {
    const { model } = this;
    if (this.ahead?.version !== model.get("version")) this.forget();
    for (const name of PICTURES) {
      const before = this.data[name]?.svg;
      if (!this.read(name)) continue;
      const data = this.data[name];
      if (data.svg !== before) this.lay(name, data, parsed(data.svg ?? ""));
    }
    this.read("frames");
    this.fold();
    for (const [label, button] of Object.entries(this.named)) put(button, model.get("labels")[label] || label);
    this.follow();
    this.root.dataset.version = model.get("version");
    if (this.isPresenting) this.present(this.presented);
    this.rest();
    this.save(model.get("download"));
  }

  save({ number, name, mime, content }) {
    if (!number || number === this.saved) return;
    const first = this.saved === undefined && this.shown === undefined;
    this.saved = number;
    if (first) return; // a page that is opened anew has nothing to save
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes], { type: mime }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  overlay(name) {
    const svg = this.cards[name].querySelector("svg");
    if (svg && !this.overlays[name]) this.overlays[name] = mark("g", svg, { class: "zeroviz-moment" });
    return svg ? this.overlays[name] : null;
  }

  // ---- a moment of the step ----

  // The film of the state that is shown by now, at the same place of the step as the one before: that at which the
  // reader left it, however many states ago.
  follow() {
    const frames = (this.frames = this.data.frames);
    this.slider.max = Math.max(0, (frames.words?.length ?? 1) - 1);
    if (!frames.words) return void this.go(this.cursor, false);
    this.place ??= placeOf(frames, this.cursor);
    const to = frameAt(frames, this.place);
    const isElsewhere = to !== this.cursor;
    this.go(to, false);
    if (isElsewhere) this.keepCursor();
  }

  go(to, asked = true) {
    const { frames } = this;
    const count = frames.words?.length ?? 0;
    this.sections.timeline.classList.toggle("zeroviz-still", count === 0);
    if (!count) return;
    this.cursor = Math.min(Math.max(0, to), count - 1);
    const now = this.cursor;
    this.onFilm(now);
    this.onBars(now);
    this.onMap(now);
    put(this.words, `${now} of ${count - 1}: ${frames.words[now]}`);
    this.slider.value = now;
    this.slider.setAttribute("aria-valuetext", frames.words[now]);
    this.root.dataset.cursor = now;
    this.tellHeld(now);
    if (!asked) return;
    this.place = placeOf(frames, now);
    this.keepCursor();
  }

  keepCursor() {
    clearTimeout(this.saving);
    this.saving = setTimeout(() => {
      this.model.set("cursor", this.cursor);
      this.model.save_changes();
    }, SAVE_MS);
  }

  onFilm(now) {
    const { xs, top, bottom } = this.data.film;
    const layer = this.overlay("film");
    if (!layer || !xs) return;
    layer.line ??= mark("path", layer, { class: "zeroviz-cursor-line" });
    trace(layer.line, `M${xs[now]} ${top}V${bottom}`);
  }

  onBars(now) {
    const { left, right, most, bars, of } = this.data.bars;
    const layer = this.overlay("bars");
    if (!layer || !bars) return;
    if (of !== this.frames.of) return void trace(layer.line, "");
    const x = left + ((right - left) * this.frames.nbytes[now]) / Math.max(1, most);
    const whole = this.frames.each;
    const path = bars
      .filter(([, , is_shown]) => whole || is_shown)
      .map(([y, height]) => `M${x} ${y - 3}V${y + height + 3}M${x - 5} ${y - 7}H${x + 5}L${x} ${y}Z`)
      .join("");
    layer.line ??= mark("path", layer, { class: "zeroviz-cursor-line" });
    trace(layer.line, path);
  }

  onMap(now) {
    const { columns, of } = this.data.map;
    const layer = this.overlay("map");
    if (!layer || !columns) return;
    if (of !== this.frames.of) return void trace(layer.line, "");
    layer.line ??= mark("path", layer, { class: "zeroviz-gathered-line" });
    const path = this.frames.gathered[now]
      .map((unit) => columns[this.frames.units[unit]])
      .filter(Boolean)
      .map(([x, width, y, height]) => `M${x} ${y}h${width}v${height}h${-width}Z`)
      .join("");
    trace(layer.line, path);
  }

  tellHeld(now) {
    const { categories, held, unit } = this.frames;
    const words = categories
      .map((name, number) => [name, held[now][number]])
      .filter(([, nbytes]) => nbytes)
      .map(([name, nbytes]) => `${name} ${amount(nbytes, unit)}`)
      .join(" · ");
    put(this.held, words);
  }

  remove() {
    this.watcher.disconnect();
    clearTimeout(this.resting);
    window.removeEventListener("resize", this.resized);
    if (this.isPresenting) this.leave();
    document.removeEventListener("keydown", this.toQuestion, true);
    this.model.off("change", this.changed);
    this.model.off("msg:custom", this.told);
    for (const [, slider, moved] of this.sliders) slider.off("change:index", moved);
    for (const kind of ["focusout", "keydown"]) document.removeEventListener(kind, this.typed, true);
    this.model.off("change:cursor", this.moved);
  }
}

function render({ model, el }) {
  const stage = new Stage(model, el);
  return () => stage.remove();
}

export default { render };
