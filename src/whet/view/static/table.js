/* A list of many rows, of which only those in sight are elements. */

import { h, put } from "./dom.js";

/**
 * options: columns [{key, name, width, right, title, sort}], height (of a row, pixels), cells(row) -> texts and nodes,
 * absent(row): it cannot be opened, open(row), sorted(key): a heading was chosen, moved(place): another row is current.
 * The result has `element`, `show(rows, {sort, down, place, stay})`, `move(by)`, `open()`, `place`, `row`, `focus()`.
 */
export function virtualList(options) {
  const { columns, height = 26, label } = options;
  const spacer = h("div", { class: "spacer" });
  const sight = h("div", { class: "sight" });
  const body = h("div", { class: "rows", tabindex: 0, role: "rowgroup" }, spacer, sight);
  const heading = h("div", { class: "row heading", role: "row" });
  const element = h(
    "div",
    { class: "virtual", role: "grid", "aria-label": label, data: { virtual: label } },
    heading,
    body,
  );
  const template = columns.map((column) => column.width ?? "1fr").join(" ");
  element.style.setProperty("--columns", template);
  element.style.setProperty("--row-height", `${height}px`);
  let rows = [];
  const list = { element, place: 0, show, move, open, focus: () => body.focus({ preventScroll: true }) };
  Object.defineProperty(list, "row", { get: () => rows[list.place] });
  let first = -1;

  function drawHeading(sort, down) {
    put(
      heading,
      columns.map((column) =>
        h(
          "div",
          {
            role: "columnheader",
            class: column.right ? "right" : null,
            title: column.title,
            "aria-sort": column.key === sort ? (down ? "descending" : "ascending") : null,
          },
          column.sort === false
            ? column.name
            : h(
                "button",
                { type: "button", data: { sort: column.key }, on: { click: () => options.sorted(column.key) } },
                column.name,
                column.key === sort ? (down ? " ▾" : " ▴") : "",
              ),
        ),
      ),
    );
  }

  function draw(anyway = false) {
    const start = Math.max(Math.floor(body.scrollTop / height) - 6, 0);
    const count = Math.ceil((body.clientHeight || 600) / height) + 12;
    if (!anyway && start === first) return;
    first = start;
    const inSight = rows.slice(start, start + count);
    sight.style.setProperty("transform", `translateY(${start * height}px)`);
    put(
      sight,
      inSight.map((row, n) => {
        const place = start + n;
        return h(
          "div",
          {
            class: options.absent?.(row) ? "row absent" : "row",
            role: "row",
            id: `row-${place}`,
            "aria-rowindex": place + 2,
            "aria-selected": String(place === list.place),
            data: { place },
            on: {
              click: (event) => {
                if (!event.target.closest("a")) {
                  set(place);
                  open();
                }
              },
            },
          },
          options
            .cells(row)
            .map((child, c) => h("div", { role: "gridcell", class: columns[c].right ? "right" : null }, child)),
        );
      }),
    );
    body.setAttribute("aria-activedescendant", `row-${list.place}`);
  }

  /** stay: what is in sight stays there, and the current row need not be in sight. */
  function show(next, { sort = null, down = false, place = 0, stay = false } = {}) {
    rows = next;
    list.place = Math.min(Math.max(place, 0), Math.max(rows.length - 1, 0));
    element.setAttribute("aria-rowcount", rows.length + 1);
    element.dataset.rows = rows.length;
    spacer.style.setProperty("height", `${rows.length * height}px`);
    drawHeading(sort, down);
    if (!stay) reveal();
    draw(true);
  }

  function reveal() {
    const top = list.place * height;
    const seen = body.clientHeight || 600;
    if (top < body.scrollTop) body.scrollTop = top;
    else if (top + height > body.scrollTop + seen) body.scrollTop = top + height - seen;
  }

  function set(place) {
    if (!rows.length) return;
    list.place = Math.min(Math.max(place, 0), rows.length - 1);
    reveal();
    draw(true);
    options.moved?.(list.place);
  }

  function move(by) {
    set(list.place + by);
  }

  function open() {
    if (rows.length) options.open(rows[list.place]);
  }

  body.addEventListener("scroll", () => draw());
  body.addEventListener("keydown", (event) => {
    const page = Math.max(Math.floor(body.clientHeight / height) - 1, 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length }[
      event.key
    ];
    if (by === undefined) return;
    move(by);
    event.preventDefault();
  });
  new ResizeObserver(() => draw(true)).observe(body);
  return list;
}
