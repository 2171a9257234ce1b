/* Elements and how values are written. Text reaches the page through text nodes only: what a model wrote is never
 * markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An element. props: attributes; `on`: listeners; `data`: data attributes; `style`: properties set through the CSSOM,
 * as the page's policy forbids style attributes. Children: nodes, texts, lists of them; null and false are left out. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element, as `h`. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "data") for (const [key, one] of Object.entries(value)) set(element, `data-${key}`, one);
    else if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name === "value" || name === "checked") element[name] = value;
    else set(element, name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

function set(element, name, value) {
  if (value !== null && value !== undefined && value !== false) element.setAttribute(name, String(value));
}

/** Replace what an element holds. */
export function put(element, ...children) {
  element.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Replace what an element holds by its newer form, while somebody looks at it: what is open, scrolled, zoomed or in
 * focus stays so in each part that has the same `data-part` as before. */
export function renew(element, ...children) {
  const parts = () => [...element.querySelectorAll("[data-part]")];
  const before = new Map(parts().map((part) => [part.dataset.part, looks(part)]));
  put(element, ...children);
  for (const part of parts()) {
    const looked = before.get(part.dataset.part);
    if (!looked) continue;
    if (part.tagName === "DETAILS") part.open = looked.open;
    part.scrollTop = looked.top;
    part.look?.(looked.view);
    if (looked.focused) (part.querySelector("svg[tabindex], summary") ?? part).focus({ preventScroll: true });
  }
}

/** How a part is looked at. A chart has `view()`, which says what it shows, and `look(view)`. */
function looks(part) {
  const focused = part.contains(document.activeElement);
  return { open: part.open, top: part.scrollTop, view: part.view?.(), focused };
}

// ---------------------------------------------------------------- text of models

const NAMED = { 9: "→", 10: "↵", 32: "·" };
// Controls, soft hyphen, what changes the direction of writing, what has no width, half characters, private tags.
const UNSEEN = new RegExp(
  [
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180e\\u200b-\\u200f]",
    "[\\u2028-\\u202e\\u2060-\\u206f\\ufe00-\\ufe0f\\ufeff\\ufff9-\\uffff]",
    "[\\ud800-\\udbff](?![\\udc00-\\udfff])",
    "(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
    "\\udb40[\\udc00-\\udfff]",
  ].join("|"),
  "g",
);

/** How a character that is not seen is shown: by its code point. Fonts that have pictures of controls are rare. */
function symbol(character) {
  return `⟨${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** Text with characters that are not seen, or that would turn the order of others, as symbols. New lines and tabs
 * stay. */
export function visible(text) {
  return String(text ?? "").replace(UNSEEN, symbol);
}

/** `visible`, with blanks, tabs and new lines as symbols, too. */
export function blanks(text) {
  return visible(text).replace(/[ \t\n]/g, (character) => NAMED[character.charCodeAt(0)]);
}

/** One line of a text, cut to `most` characters. */
export function line(text, most = 120) {
  const one = visible(text)
    .replace(/\s*\n\s*/g, " ↵ ")
    .replace(/\t/g, " ");
  return one.length > most ? `${one.slice(0, most - 1)}…` : one;
}

// ---------------------------------------------------------------- numbers

const GROUPED = new Intl.NumberFormat("en-US");

/** A number with about `digits` significant digits; – for none. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return GROUPED.format(value).replace("-", "−");
  const size = Math.abs(value);
  const text =
    size !== 0 && (size < 1e-4 || size >= 1e7)
      ? value.toExponential(Math.max(digits - 2, 1))
      : String(Number(value.toPrecision(size >= 10 ** digits ? Math.ceil(Math.log10(size)) : digits)));
  return text.replace("-", "−").replace("e−", "e-");
}

/** As many decimals as given: numbers below each other line up. */
export function fixed(value, decimals = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toFixed(decimals).replace("-", "−");
}

/** 12.3k, 4.5M: three digits. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  for (const [size, letter] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    const rounded = Number((value / size).toPrecision(3));
    if (Math.abs(rounded) >= 1) return `${rounded}${letter}`.replace("-", "−");
  }
  return number(value, 3);
}

/** Seconds as 0.42 s, 1:05, 2:03:04. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const [all, two] = [Math.round(seconds), (n) => String(n).padStart(2, "0")];
  const hours = Math.floor(all / 3600);
  const rest = `${hours ? two(Math.floor(all / 60) % 60) : Math.floor(all / 60)}:${two(all % 60)}`;
  return hours ? `${hours}:${rest}` : rest;
}

/** The value at a share of sorted numbers. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

// ---------------------------------------------------------------- parts of pages

/** A headed part of a page. */
export function panel(title, props, ...children) {
  const heading = title && h("h2", {}, title);
  return h(
    "section",
    { "aria-label": typeof title === "string" ? title : null, ...props, class: `panel ${props?.class ?? ""}` },
    heading,
    ...children,
  );
}

/** A column of numbers for table. */
export const right = (name, title) => ({ name, title, right: true });

/** A table of plain cells. columns: names, or {name, right, title}. rows: lists of texts and nodes. */
export function table(columns, rows, props = {}) {
  const heads = columns.map((column) => (typeof column === "string" ? { name: column } : column));
  const cell = (tag, column, child, scope) =>
    h(tag, { class: column.right ? "right" : null, title: column.title, scope }, child);
  const body = rows.map((row) =>
    h(
      "tr",
      row.props ?? {},
      (row.cells ?? row).map((child, n) =>
        h(
          "td",
          { class: heads[n].right ? "right" : null },
          typeof child === "number" || child === null || child === undefined ? number(child) : child,
        ),
      ),
    ),
  );
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      props,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((c) => cell("th", c, c.name, "col")),
        ),
      ),
      h("tbody", {}, body),
    ),
  );
}

/** That a list shows the first of more rows; null where it shows all. */
export function firstOf(shown, all) {
  return shown < all ? h("p", { class: "dim", data: { first: shown } }, `The first ${number(shown)} of ${number(all)}.`) : null;
}

/** Names and values, in one line that wraps. Entries without a value are left out. */
export function facts(entries) {
  const known = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { data: { fact: name } }, value))),
  );
}

/** A choice of one of several, as buttons. options: [value, label]. */
export function choice(label, options, chosen, act) {
  return h(
    "div",
    { class: "choice", role: "group", "aria-label": label },
    options.map(([value, text]) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String(value === chosen),
          data: { choice: value },
          on: { click: () => act(value) },
        },
        text,
      ),
    ),
  );
}

/** A labelled selection. options: values, or [value, label]. */
export function select(label, options, chosen, act) {
  const pairs = options.map((option) => (Array.isArray(option) ? option : [option, option]));
  const element = h(
    "select",
    { "aria-label": label, data: { select: label }, on: { change: (event) => act(event.target.value) } },
    pairs.map(([value, text]) => h("option", { value: value, selected: value === chosen }, text)),
  );
  element.value = chosen;
  return h("label", { class: "field" }, h("span", {}, label), element);
}

/** A labelled box to tick. */
export function tick(label, on, act) {
  return h(
    "label",
    { class: "tick" },
    h("input", { type: "checkbox", checked: on, on: { change: (event) => act(event.target.checked) } }),
    label,
  );
}

/** A button that copies a text. `make`: the text, or a function that gives it. */
export function copyButton(label, make) {
  const button = h("button", { type: "button", class: "quiet", data: { copy: label } }, label);
  button.addEventListener("click", async () => {
    const text = typeof make === "function" ? make() : make;
    const done = await copied(text);
    button.textContent = done ? "copied" : "cannot copy here";
    setTimeout(() => {
      button.textContent = label;
    }, 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages from files and from other hosts have no clipboard: the older command may still be there.
    const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** A command to copy. */
export function command(text) {
  return h("div", { class: "command" }, h("code", { data: { command: "" } }, visible(text)), copyButton("copy", text));
}
