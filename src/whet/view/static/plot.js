/* Charts drawn as SVG: curves over steps, histograms, small bars. */

import { apart, css, DASHES } from "./color.js";
import { h, number, put, svg, visible } from "./dom.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 14, 12, 34];
const FEW_POINTS = 48;

// ---------------------------------------------------------------- axes

/** Round values from low to high, about `count`. */
export function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(count, 1);
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = size * [1, 2, 2.5, 5, 10].find((n) => n * size >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  const most = Math.floor(high / step + 1e-9) - first;
  // Beyond 2^53 a number and the next one may be equal: what is counted is how many, so that it ends.
  const found = Array.from({ length: most + 1 || 0 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
  return [...new Set(found)];
}

function logTicks(low, high) {
  const found = [];
  const many = Math.log10(high / low) > 3;
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const n of many ? [1] : [1, 2, 5]) found.push(n * 10 ** power);
  }
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  const every = Math.ceil(inside.length / 6);
  return inside.length > 1 ? inside.filter((_, n) => n % every === 0) : [low, high];
}

/** From values to pixels. */
export function scale(low, high, from, to, log) {
  const of = log ? Math.log : (value) => value;
  const [first, span] = [of(low), of(high) - of(low) || 1];
  return (value) => from + ((of(value) - first) / span) * (to - from);
}

/** The lowest and the highest of all numbers, with some room; of none, 0 to 1. */
function range(lists, log) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists)
    for (const value of list) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  if (low > high) return [log ? 0.1 : 0, 1];
  if (log) return [low / 1.1, high * 1.1];
  const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.5;
  // Shares and counts start at zero; they get no room below it.
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

/** Tick values as text: as few digits as tell them apart. */
function labels(values) {
  for (let digits = 3; digits < 9; digits++) {
    const texts = values.map((value) => number(value, digits));
    if (new Set(texts).size === values.length) return texts;
  }
  return values.map(String);
}

function frame(width, height, xs, ys, x, y, options) {
  const bottom = height - BOTTOM;
  const texts = labels(ys);
  return svg(
    "g",
    { class: "axes" },
    ys.map((value, n) => [
      svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: LEFT - 6, y: y(value), dy: "0.32em", "text-anchor": "end" }, texts[n]),
    ]),
    xs.map((value) => [
      svg("line", { x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4, class: "tick" }),
      svg(
        "text",
        { x: x(value), y: bottom + 15, "text-anchor": "middle" },
        (options.xText ?? ((n) => number(n, 6)))(value),
      ),
    ]),
    svg("line", { x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom, class: "base" }),
    svg("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end", class: "unit" }, options.xLabel ?? "step"),
    options.yLabel && svg("text", { x: LEFT + 4, y: TOP - 3, class: "unit" }, options.yLabel),
  );
}

// ---------------------------------------------------------------- curves

/** The points of a series that can be drawn, and its smoothed form: an exponential mean, without the bias of its start,
 * that begins anew with each stage. */
function points(series, log, smooth, [low, high], breaks) {
  const [x, y, soft] = [[], [], []];
  let [mean, weight, stage] = [0, 0, 0];
  for (let n = 0; n < series.x.length; n++) {
    const value = series.y[n];
    if (value === null || value === undefined || Number.isNaN(value) || (log && value <= 0)) continue;
    const now = breaks.filter((one) => one.x < series.x[n]).length;
    if (now !== stage) [mean, weight, stage] = [0, 0, now];
    mean = smooth * mean + (1 - smooth) * value;
    weight = smooth * weight + (1 - smooth);
    if (series.x[n] < low || series.x[n] > high) continue;
    x.push(series.x[n]);
    y.push(value);
    soft.push(mean / weight);
  }
  return { ...series, x, y, soft };
}

/** A path. Of more points than pixels it keeps each pixel's first, lowest, highest and last. */
function path(xs, ys, x, y, width) {
  const at = (n) => `${x(xs[n]).toFixed(1)} ${y(ys[n]).toFixed(1)}`;
  if (xs.length < 3 * width) return xs.length ? `M${xs.map((_, n) => at(n)).join("L")}` : "";
  const kept = [];
  for (let start = 0; start < xs.length;) {
    const pixel = Math.floor(x(xs[start]));
    let [end, low, high] = [start, start, start];
    for (; end < xs.length && Math.floor(x(xs[end])) === pixel; end++) {
      if (ys[end] < ys[low]) low = end;
      if (ys[end] > ys[high]) high = end;
    }
    kept.push(...[...new Set([start, Math.min(low, high), Math.max(low, high), end - 1])]);
    start = end;
  }
  return `M${kept.map(at).join("L")}`;
}

function area(band, x, y) {
  const known = band.x.map((_, n) => n).filter((n) => band.low[n] !== null && band.high[n] !== null);
  const up = known.map((n) => `${x(band.x[n]).toFixed(1)} ${y(band.high[n]).toFixed(1)}`);
  const down = known.reverse().map((n) => `${x(band.x[n]).toFixed(1)} ${y(band.low[n]).toFixed(1)}`);
  return up.length ? `M${up.join("L")}L${down.join("L")}Z` : "";
}

/** The index of the point nearest to a value of x. */
function nearest(xs, value) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(xs[low] - value) <= Math.abs(xs[high] - value) ? low : high;
}

/**
 * Curves. options:
 *   name       what the chart shows, for its heading and for screen readers
 *   series     [{name, x, y}]: x ascends; y may have nulls
 *   bands      [{x, low, high}]: areas behind the curves
 *   marks      [{x, text}]: steps where something happened;  breaks: [{x, text}]: where stages begin
 *   log, smooth (0 to 1), zoom ([from, to] or null), zoomed (told of a new zoom), height, xLabel, yLabel
 *   where      x as text, for what is hovered;  open: told of an x that was chosen with a click or Enter
 * Dragging zooms; a double click or Escape shows everything. The arrow keys move along the points.
 */
export function chart(options) {
  const { series, bands = [], marks = [], breaks = [], log = false, smooth = 0, height = 190 } = options;
  const holder = h("div", { class: "plot" });
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const data = { chart: options.name, series: series.length, part: `chart ${options.name}` };
  const figure = h("figure", { class: "chart", data }, holder, tip);
  const where = options.where ?? ((value) => `${options.xLabel ?? "step"} ${number(value, 8)}`);
  const colorOf = (n) => css(apart(series[n].color ?? n));
  let zoom = options.zoom ?? null;
  let drawn = null;
  let at = null;
  figure.view = () => ({ zoom, at: tip.hidden ? null : at });
  figure.look = (view) => {
    zoom = view.zoom;
    draw();
    if (view.at !== null) at = point(view.at);
  };

  function draw() {
    const width = Math.max(Math.round(holder.clientWidth || figure.clientWidth || 480), 220);
    const ends = [...series, ...bands].filter((one) => one.x.length).map((one) => [one.x[0], one.x[one.x.length - 1]]);
    const all = ends.length
      ? [Math.min(...ends.map((pair) => pair[0])), Math.max(...ends.map((pair) => pair[1]))]
      : [0, 1];
    const [left, right] = zoom ?? (all[1] > all[0] ? all : [all[0] - 0.5, all[1] + 0.5]);
    const kept = series.map((one) => points(one, log, smooth, [left, right], breaks));
    const inside = bands.map((band) => band.x.map((_, n) => n).filter((n) => band.x[n] >= left && band.x[n] <= right));
    const [low, high] = range(
      [
        ...kept.map((one) => one.y),
        ...bands.flatMap((band, b) => [
          inside[b].map((n) => band.low[n] ?? NaN),
          inside[b].map((n) => band.high[n] ?? NaN),
        ]),
      ],
      log,
    );
    const x = scale(left, right, LEFT, width - RIGHT, false);
    const y = scale(low, high, height - BOTTOM, TOP, log);
    const few = ticks(left, right, Math.max(Math.floor(width / 110), 2)).filter(
      (value) => !options.wholeX || Number.isInteger(value),
    );
    const first = kept[0];
    const said = first?.y.length
      ? `from ${number(first.y[0])} to ${number(first.y[first.y.length - 1])}, ${first.y.length} values`
      : "no values";
    const cursor = svg("g", { class: "cursor" });
    const drag = svg("rect", { class: "drag", y: TOP, height: height - TOP - BOTTOM, width: 0, visibility: "hidden" });
    const image = svg(
      "svg",
      {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "img",
        tabindex: 0,
        "aria-label": `${options.name}: ${said}`,
      },
      frame(width, height, few, log ? logTicks(low, high) : ticks(low, high, Math.floor(height / 36)), x, y, options),
      bands.map((band, b) =>
        svg("path", {
          d: area(
            {
              x: inside[b].map((n) => band.x[n]),
              low: inside[b].map((n) => band.low[n]),
              high: inside[b].map((n) => band.high[n]),
            },
            x,
            y,
          ),
          fill: css(apart(band.color ?? 0)),
          opacity: 0.16,
        }),
      ),
      breaks
        .filter((one) => one.x >= left && one.x < right)
        .map((one) => [
          svg("line", { x1: x(one.x), x2: x(one.x), y1: TOP, y2: height - BOTTOM, class: "break" }),
          svg("text", { x: x(one.x) + 4, y: TOP + 3, class: "unit" }, one.text),
        ]),
      marks
        .filter((one) => one.x >= left && one.x <= right)
        .map((one) =>
          svg("path", { class: "mark", d: `M${x(one.x)} ${TOP - 2}l-4 -7h8z` }, svg("title", {}, one.text)),
        ),
      kept.map((one, n) => [
        svg("path", {
          d: path(one.x, one.y, x, y, width),
          class: smooth ? "curve raw" : "curve",
          stroke: colorOf(n),
          "stroke-dasharray": DASHES[n % DASHES.length],
        }),
        smooth > 0 &&
          svg("path", {
            d: path(one.x, one.soft, x, y, width),
            class: "curve",
            stroke: colorOf(n),
            "stroke-dasharray": DASHES[n % DASHES.length],
          }),
        one.x.length <= FEW_POINTS &&
          one.x.map((value, k) => svg("circle", { cx: x(value), cy: y(one.y[k]), r: 2.2, fill: colorOf(n) })),
      ]),
      cursor,
      drag,
    );
    drawn = { x, y, kept, left, right, width, cursor, drag };
    const [focused, pointed] = [holder.contains(document.activeElement), tip.hidden ? null : at];
    put(holder, image);
    listen(image);
    if (focused) image.focus({ preventScroll: true });
    if (pointed !== null) at = point(pointed);
  }

  function pixel(event) {
    const bounds = holder.getBoundingClientRect();
    return Math.min(Math.max(event.clientX - bounds.left, LEFT), drawn.width - RIGHT);
  }

  const valueAt = (place) => drawn.left + ((place - LEFT) / (drawn.width - RIGHT - LEFT)) * (drawn.right - drawn.left);

  function point(value) {
    const { kept, x, y, cursor, width } = drawn;
    const close = kept.map((one) => (one.x.length ? nearest(one.x, value) : null));
    const chosen = close.map((n, s) => (n === null ? null : kept[s].x[n])).filter((n) => n !== null);
    if (!chosen.length) return null;
    const at = chosen.reduce((best, one) => (Math.abs(one - value) < Math.abs(best - value) ? one : best));
    const lines = kept.flatMap((one, s) => {
      const n = close[s];
      if (n === null || one.x[n] !== at) return [];
      const soft = smooth > 0 ? ` (smoothed ${number(one.soft[n])})` : "";
      return [
        h(
          "div",
          {},
          swatch(colorOf(s), DASHES[s % DASHES.length]),
          visible(one.name),
          " ",
          h("b", {}, number(one.y[n], 5)),
          soft,
        ),
      ];
    });
    put(
      cursor,
      svg("line", { x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }),
      kept.map(
        (one, s) =>
          close[s] !== null &&
          one.x[close[s]] === at &&
          svg("circle", {
            cx: x(at),
            cy: y(smooth > 0 ? one.soft[close[s]] : one.y[close[s]]),
            r: 3.5,
            fill: colorOf(s),
          }),
      ),
    );
    put(
      tip,
      h("div", { class: "where" }, where(at)),
      lines,
      marks.filter((mark) => mark.x === at).map((mark) => h("div", {}, `▼ ${mark.text}`)),
    );
    tip.hidden = false;
    const left = x(at) > width / 2 ? x(at) - tip.offsetWidth - 12 : x(at) + 12;
    tip.style.left = `${Math.max(left, 0)}px`;
    tip.style.top = `${TOP}px`;
    return at;
  }

  function rest() {
    tip.hidden = true;
    put(drawn.cursor);
  }

  function show(next) {
    zoom = next;
    options.zoomed?.(next);
    rest();
    draw();
  }

  function listen(image) {
    let start = null;
    image.addEventListener("pointerdown", (event) => {
      start = pixel(event);
      image.setPointerCapture(event.pointerId);
    });
    image.addEventListener("pointermove", (event) => {
      const here = pixel(event);
      at = point(valueAt(here));
      if (start !== null && Math.abs(here - start) > 3) {
        drawn.drag.setAttribute("x", Math.min(start, here));
        drawn.drag.setAttribute("width", Math.abs(here - start));
        drawn.drag.setAttribute("visibility", "visible");
      }
    });
    image.addEventListener("pointerup", (event) => {
      const [from, to] = [start, pixel(event)];
      start = null;
      drawn.drag.setAttribute("visibility", "hidden");
      if (from !== null && Math.abs(to - from) > 6) show([valueAt(Math.min(from, to)), valueAt(Math.max(from, to))]);
      else if (at !== null) options.open?.(at);
    });
    image.addEventListener("pointerleave", rest);
    image.addEventListener("blur", rest);
    image.addEventListener("dblclick", () => show(null));
    image.addEventListener("keydown", (event) => {
      const xs = drawn.kept[0]?.x ?? [];
      const moves = { ArrowRight: 1, ArrowLeft: -1 };
      if (event.key in moves && xs.length) {
        const now = at === null ? (moves[event.key] > 0 ? -1 : xs.length) : nearest(xs, at);
        at = point(xs[Math.min(Math.max(now + moves[event.key], 0), xs.length - 1)]);
        event.preventDefault();
        event.stopPropagation();
      } else if (event.key === "Enter" && at !== null) options.open?.(at);
      else if (event.key === "Escape" && zoom) {
        show(null);
        event.stopPropagation();
      }
    });
  }

  watchWidth(holder, draw);
  return figure;
}

/** Draw once the element has a width, and again with each new one. */
export function watchWidth(element, draw) {
  let width = -1;
  draw();
  new ResizeObserver(() => {
    if (element.clientWidth && element.clientWidth !== width) {
      width = element.clientWidth;
      draw();
    }
  }).observe(element);
}

/** A piece of a curve, for legends. */
export function swatch(color, dash = null) {
  return svg(
    "svg",
    { class: "swatch", width: 18, height: 8, "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, stroke: color, "stroke-width": 2, "stroke-dasharray": dash }),
  );
}

/** Names of curves with their colours and patterns. */
export function legend(names) {
  return h(
    "div",
    { class: "legend" },
    names.map((name, n) => h("span", {}, swatch(css(apart(n)), DASHES[n % DASHES.length]), visible(name))),
  );
}

// ---------------------------------------------------------------- bars

/** A histogram. edges: one more than counts. */
export function histogram({ name, edges, counts, xLabel, height = 150, log = false, xText }) {
  const holder = h("div", { class: "plot" });
  const figure = h("figure", { class: "chart", data: { histogram: name } }, holder);
  watchWidth(holder, () => {
    const width = Math.max(holder.clientWidth || 480, 220);
    const shown = (count) => (log ? Math.log10(1 + count) : count);
    const high = Math.max(...counts.map(shown), 1e-9);
    const x = scale(0, counts.length, LEFT, width - RIGHT, false);
    const y = scale(0, high * 1.05, height - BOTTOM, TOP, false);
    const ys = log ? ticks(0, high, 3).filter(Number.isInteger) : ticks(0, high, 3);
    const every = Math.ceil(edges.length / Math.max(Math.floor(width / 70), 2));
    const text = xText ?? ((value) => number(value, 3));
    put(
      holder,
      svg(
        "svg",
        {
          width,
          height,
          role: "img",
          "aria-label": `${name}: ${counts.map((count, n) => `${text(edges[n])}: ${count}`).join(", ")}`,
        },
        svg(
          "g",
          { class: "axes" },
          ys.map((value) => [
            svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
            svg(
              "text",
              { x: LEFT - 6, y: y(value), dy: "0.32em", "text-anchor": "end" },
              log ? `${number(10 ** value - (value ? 0 : 1))}` : number(value),
            ),
          ]),
          edges.map(
            (edge, n) =>
              n % every === 0 && svg("text", { x: x(n), y: height - BOTTOM + 15, "text-anchor": "middle" }, text(edge)),
          ),
          svg("line", { x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: "base" }),
          svg("text", { x: width - RIGHT, y: height - 3, "text-anchor": "end", class: "unit" }, xLabel),
        ),
        counts.map((count, n) =>
          svg(
            "rect",
            {
              x: x(n) + 0.5,
              width: Math.max(x(n + 1) - x(n) - 1, 1),
              y: y(shown(count)),
              height: Math.max(height - BOTTOM - y(shown(count)), 0),
              class: "bar",
            },
            svg("title", {}, `${text(edges[n])} to ${text(edges[n + 1])}: ${number(count)}`),
          ),
        ),
      ),
    );
  });
  return figure;
}

/** The rewards of a group as small bars from zero; the one of `chosen` is filled. Without a reward: a cross. */
export function sparkline(values, chosen = -1, [low, high] = [Math.min(0, ...values), Math.max(0, ...values)]) {
  const [width, height, span] = [Math.min(values.length * 5, 80), 16, high - low || 1];
  const y = (value) => height - 1 - ((value - low) / span) * (height - 2);
  return svg(
    "svg",
    { class: "spark", width, height, "aria-hidden": "true", "data-spark": values.length },
    values.map((value, n) =>
      value === null
        ? svg("path", {
            d: `M${(n * width) / values.length} ${height - 5}l3.5 3.5m0 -3.5l-3.5 3.5`,
            class: n === chosen ? "chosen" : null,
          })
        : svg("rect", {
            x: (n * width) / values.length,
            width: Math.max(width / values.length - 1, 1),
            y: Math.min(y(value), y(0)) - 0.5,
            height: Math.abs(y(value) - y(0)) + 1,
            class: n === chosen ? "chosen" : null,
          }),
    ),
  );
}
