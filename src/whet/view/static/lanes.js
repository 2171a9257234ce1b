/* Lanes of time, one below the other: what each process did. */

import { apart, css, ink } from "./color.js";
import { duration, h, number, put, svg, visible } from "./dom.js";
import { scale, ticks, watchWidth } from "./plot.js";

const RIGHT_MARGIN = 14;

const KINDS = { phase: "phase of a step", work: "work", part: "part of a work", wait: "wait" };

/** Lanes: [{name, of, spans: [[name, kind, start_s, end_s]]}]. Dragging zooms, a double click shows everything. */
export function lanesChart(lanes, seconds) {
  const holder = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const figure = h("figure", { class: "chart lanes", data: { lanes: lanes.length, part: "lanes" } }, holder, tip);
  const [names, row] = [150, 24];
  const end_s = seconds || 1;
  let [from, to] = [0, end_s];
  figure.view = () => (to - from < end_s ? [from, to] : null);
  figure.look = (view) => {
    [from, to] = view ?? [0, end_s];
    draw();
  };
  const colors = new Map();
  for (const lane of lanes)
    for (const [name, kind] of lane.spans) if (kind !== "wait" && !colors.has(name)) colors.set(name, colors.size);

  function draw() {
    const width = Math.max(holder.clientWidth || 800, 240);
    const height = lanes.length * row + 34;
    const x = scale(from, to, names, width - RIGHT_MARGIN, false);
    const labels = [];
    const boxes = lanes.flatMap((lane, n) =>
      lane.spans.flatMap(([name, kind, start, end]) => {
        const [left, right] = [Math.max(x(start), names), Math.min(x(end), width - RIGHT_MARGIN)];
        if (end < from || start > to || right < left) return [];
        const inner = kind === "part" ? 5 : 0;
        if (right - left > 7 * name.length && kind !== "part") {
          labels.push(
            svg(
              "text",
              kind === "wait"
                ? { x: left + 4, y: n * row + 15, class: "inside" }
                : { x: left + 4, y: n * row + 15, class: "inside", style: { fill: ink(apart(colors.get(name))) } },
              visible(name),
            ),
          );
        }
        return [
          svg("rect", {
            x: left,
            width: Math.max(right - left, 0.6),
            y: n * row + 3 + inner,
            height: row - 6 - 2 * inner,
            rx: 1.5,
            class: `span ${kind}`,
            fill: kind === "wait" ? "url(#hatch)" : css(apart(colors.get(name))),
            "data-text": told(lane.name, name, kind, start, end),
          }),
        ];
      }),
    );
    const image = svg(
      "svg",
      {
        width,
        height,
        role: "img",
        tabindex: 0,
        "aria-label": `timeline of ${lanes.map((lane) => lane.name).join(", ")}`,
      },
      svg(
        "defs",
        {},
        svg(
          "pattern",
          { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
          svg("rect", { width: 6, height: 6, class: "hatch-ground" }),
          svg("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch" }),
        ),
      ),
      lanes.map((lane, n) => [
        svg("text", { x: names - 8, y: n * row + 16, "text-anchor": "end", class: "lane" }, visible(lane.name)),
        svg("line", { x1: names, x2: width - RIGHT_MARGIN, y1: n * row + row, y2: n * row + row, class: "grid" }),
      ]),
      ticks(from, to, Math.floor(width / 120)).map((value) => [
        svg("line", { x1: x(value), x2: x(value), y1: 0, y2: height - 30, class: "grid" }),
        svg("text", { x: x(value), y: height - 14, "text-anchor": "middle" }, number(value, 6)),
      ]),
      boxes,
      labels,
      svg("text", { x: width - RIGHT_MARGIN, y: height - 2, "text-anchor": "end", class: "unit" }, "seconds from the start"),
    );
    const focused = holder.contains(document.activeElement);
    put(holder, image);
    if (focused) image.focus({ preventScroll: true });
    const time = (event) =>
      from +
      ((Math.min(Math.max(event.clientX - holder.getBoundingClientRect().left, names), width - RIGHT_MARGIN) - names) /
        (width - RIGHT_MARGIN - names)) *
        (to - from);
    let start = null;
    image.addEventListener("pointerdown", (event) => {
      start = time(event);
    });
    image.addEventListener("pointerup", (event) => {
      const pair = [start, time(event)].sort((a, b) => a - b);
      start = null;
      if (pair[1] - pair[0] > (to - from) / 100) [from, to] = pair;
      draw();
    });
    image.addEventListener("pointermove", (event) => {
      const text = event.target.getAttribute?.("data-text");
      tip.hidden = !text;
      if (!text) return;
      tip.textContent = text;
      const bounds = figure.getBoundingClientRect();
      tip.style.left = `${Math.min(event.clientX - bounds.left + 12, Math.max(bounds.width - tip.offsetWidth, 0))}px`;
      tip.style.top = `${event.clientY - bounds.top + 14}px`;
    });
    image.addEventListener("pointerleave", () => {
      tip.hidden = true;
    });
    image.addEventListener("dblclick", () => {
      [from, to] = [0, end_s];
      draw();
    });
    image.addEventListener("keydown", (event) => {
      const width_s = to - from;
      const next = {
        ArrowLeft: [from - width_s / 4, to - width_s / 4],
        ArrowRight: [from + width_s / 4, to + width_s / 4],
        "+": [from + width_s / 4, to - width_s / 4],
        "-": [from - width_s / 2, to + width_s / 2],
      }[event.key];
      if (!next) return;
      [from, to] = [Math.max(next[0], 0), Math.min(next[1], end_s)];
      event.preventDefault();
      draw();
    });
  }
  watchWidth(holder, draw);
  const key = h(
    "div",
    { class: "legend" },
    [...colors].slice(0, 16).map(([name, n]) => h("span", {}, box(css(apart(n))), visible(name))),
    h(
      "span",
      {},
      svg(
        "svg",
        { width: 14, height: 12, "aria-hidden": "true" },
        svg("rect", { width: 14, height: 12, fill: "url(#hatch)" }),
      ),
      "wait",
    ),
  );
  return h("div", {}, key, figure);
}

/** What a span was, in words. */
function told(lane, name, kind, start, end) {
  const when = `${duration(end - start)}, from ${duration(start)} to ${duration(end)}`;
  return `${visible(lane)}: ${visible(name)} (${KINDS[kind] ?? visible(kind)}), ${when}`;
}

function box(color) {
  return svg(
    "svg",
    { width: 12, height: 12, "aria-hidden": "true" },
    svg("rect", { width: 12, height: 12, rx: 2, fill: color }),
  );
}
