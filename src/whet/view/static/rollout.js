/* One rollout: its tokens with all that was recorded of them, what was said, its messages and ids. */

import { blanks, choice, command, copyButton, facts, fixed, h, number, panel, put, quantile, select } from "./dom.js";
import { svg, tick, visible } from "./dom.js";
import { address, get, ofRun } from "./api.js";
import { apart, css, diverging, ink, sequential } from "./color.js";
import { sparkline } from "./plot.js";
import { hashOf, link } from "./route.js";
import { transcript } from "./transcript.js";

const AT_ONCE = 3000;
const VIEWS = [
  ["tokens", "tokens"],
  ["text", "text"],
  ["messages", "transcript"],
  ["ids", "token ids"],
];

/** What tokens can be coloured by. of(token): a number, or null for none. kind: how numbers become colours. */
const COLORS = {
  logprob: {
    name: "log-prob",
    of: (t) => t.logprob,
    kind: "sequential",
    unit: "nats",
    told: "by the engine, under the distribution that is trained, when the token was sampled",
  },
  difference: {
    name: "trainer minus sampler",
    of: (t) => minus(t.trainer, t.logprob),
    kind: "diverging",
    unit: "nats",
    told: "the trainer's log-prob before the update minus the engine's, of the same distribution: 0 where both are equal bit for bit",
  },
  ratio: {
    name: "ratio",
    of: (t) => {
      const nats = minus(t.trainer, t.logprob);
      return nats === null ? null : Math.exp(nats);
    },
    kind: "ratio",
    unit: "",
    told: "the trainer's probability over the engine's, before the update",
  },
  filters: {
    name: "sampled with minus log-prob",
    of: (t) => minus(t.sampled, t.logprob),
    kind: "diverging",
    unit: "nats",
    told: "log-prob after penalty and filters (top_k, top_p, min_p), minus that before them",
  },
  advantage: {
    name: "advantage",
    of: (t) => t.advantage,
    kind: "diverging",
    unit: "",
    told: "advantage: of each token if it was recorded, else the rollout's mean over its sampled tokens",
  },
  entropy: {
    name: "entropy",
    of: (t) => t.entropy,
    kind: "sequential",
    unit: "nats",
    told: "entropy of the distribution",
  },
  version: {
    name: "version",
    of: (t) => (t.mask ? t.version : null),
    kind: "class",
    unit: "",
    told: "version of the policy that sampled the token",
  },
  mask: {
    name: "mask",
    of: (t) => t.mask,
    kind: "class",
    unit: "",
    told: "1: sampled by the policy, and trained in this strand; 0: prompt, or text of the environment",
  },
  strand: {
    name: "strand",
    of: (t) => (t.shared ? 0 : t.strand + 1),
    kind: "class",
    unit: "",
    told: "tokens shared with the start of an earlier strand, and this strand's own",
  },
};

function minus(one, other) {
  return (one ?? null) === null || (other ?? null) === null ? null : one - other;
}

/** The tokens of each strand, with the values recorded of them; values of tokens that were not sampled are null. */
export function strandsOf(rollout) {
  const ends = [];
  let end = 0;
  for (const length of rollout.strand_tokens) ends.push([end, (end += length)]);
  const sampledOnly = (values, n) => (values && rollout.mask[n] ? (values[n] ?? null) : null);
  const perToken = Array.isArray(rollout.advantages) ? rollout.advantages : null;
  const strands = ends.map(([from, to], strand) => {
    const tokens = [];
    for (let n = from; n < to; n++) {
      tokens.push({
        place: n - from,
        strand,
        id: rollout.token_ids[n],
        text: rollout.pieces?.[strand]?.[n - from] ?? null,
        mask: rollout.mask[n],
        logprob: sampledOnly(rollout.logprobs, n),
        sampled: sampledOnly(rollout.sample_logprobs, n),
        trainer: sampledOnly(rollout.trainer_logprobs, n),
        reference: sampledOnly(rollout.reference_logprobs, n),
        entropy: sampledOnly(rollout.entropy, n),
        version: rollout.versions[n],
        advantage: rollout.mask[n] ? (perToken?.[n] ?? rollout.advantage) : null,
        shared: false,
      });
    }
    return tokens;
  });
  return strands.map((tokens, strand) => ({ tokens, ...fork(strands, strand) }));
}

/** With which earlier strand a strand shares the most tokens from the start, and how many. Marks them. */
function fork(strands, strand) {
  let [from, shared] = [null, 0];
  for (let other = 0; other < strand; other++) {
    const most = Math.min(strands[other].length, strands[strand].length);
    let n = 0;
    while (n < most && strands[other][n].id === strands[strand][n].id) n++;
    if (n > shared) [from, shared] = [other, n];
  }
  for (let n = 0; n < shared; n++) strands[strand][n].shared = true;
  return { from, shared };
}

export async function rolloutPage(context) {
  const { run, params } = context;
  const of = context.query.of;
  const rollout = await get(address(ofRun(run.id, "rollouts", params.stage, params.step, params.row), { of }));
  const strands = strandsOf(rollout);
  const holder = h("div", { class: "rollout-view" });
  const state = { view: "tokens", color: "logprob", strand: 0, numbers: false, ...context.query };
  state.strand = Math.min(Number(state.strand) || 0, strands.length - 1);
  state.numbers = state.numbers === "1" || state.numbers === true;
  const inTurns = (rollout.messages ?? []).length > 0;
  if (!context.query.view && inTurns) state.view = "messages";
  if (!VIEWS.some(([view]) => view === state.view)) state.view = "tokens";
  if (!Object.hasOwn(COLORS, state.color)) state.color = "logprob";

  const recorded = Object.keys(COLORS).filter((key) =>
    strands.some(({ tokens }) => tokens.some((t) => (COLORS[key].of(t) ?? null) !== null)),
  );

  function set(more) {
    Object.assign(state, more);
    context.setQuery({
      of,
      view: state.view,
      color: state.view === "tokens" ? state.color : null,
      strand: state.strand || null,
      numbers: state.numbers ? "1" : null,
    });
    draw();
  }

  function draw() {
    const strand = strands[state.strand];
    const bar = h(
      "div",
      { class: "bar" },
      choice("view", VIEWS, state.view, (view) => set({ view })),
      state.view === "tokens" &&
        select(
          "colour",
          Object.entries(COLORS).map(([key, one]) => [
            key,
            recorded.includes(key) ? one.name : `${one.name} (not recorded)`,
          ]),
          state.color,
          (color) => set({ color }),
        ),
      state.view === "tokens" && tick("numbers", state.numbers, (on) => set({ numbers: on })),
      strands.length > 1 &&
        state.view !== "messages" &&
        choice(
          "strand",
          strands.map((one, n) => [
            n,
            one.from === null ? `strand ${n}` : `strand ${n}, forks from ${one.from} at ${one.shared}`,
          ]),
          state.strand,
          (n) => set({ strand: n }),
        ),
      h("span", { class: "space" }),
      copyButton("copy as JSON", () => JSON.stringify(rollout, null, 2)),
    );
    const views = {
      tokens: () => (strand ? tokensView(strand, state) : "no tokens"),
      text: () => textView(rollout, strand),
      messages: () => transcript(rollout, strands),
      ids: () =>
        h(
          "pre",
          { class: "ids", tabindex: 0, data: { ids: "" } },
          strand ? strand.tokens.map((t) => t.id).join(" ") : "",
        ),
    };
    put(holder, bar, views[state.view]());
    document.body.dataset.view = state.view;
  }

  const others = [Number(params.row) - 1, Number(params.row) + 1].filter(
    (row) => row >= 0 && row < (rollout.rows ?? Infinity),
  );
  // Going from one to the next leaves no steps in the browser's history: back is where the list was.
  const go = (row) => () => {
    if (others.includes(row))
      location.replace(hashOf(["run", run.id, "rollout", params.stage, params.step, row], context.query));
  };
  context.keys({
    j: go(Number(params.row) + 1),
    k: go(Number(params.row) - 1),
    t: () => set({ view: "tokens" }),
    x: () => set({ view: "text" }),
    m: () => set({ view: "messages" }),
    i: () => set({ view: "ids" }),
    c: () => set({ view: "tokens", color: recorded[(recorded.indexOf(state.color) + 1) % recorded.length] }),
    Escape: () =>
      context.visit > 1
        ? history.back()
        : (location.hash = hashOf(["run", run.id, "rollouts"], {
            stage: params.stage,
            step_from: params.step,
            step_to: params.step,
          })),
  });
  draw();
  return [
    heading(run, params, rollout, others, context.query),
    summary(run, params, rollout, of),
    holder,
    commandsOf(rollout),
  ];
}

function heading(run, params, rollout, others, query) {
  const to = (row, text, label) =>
    others.includes(row)
      ? h(
          "a",
          { href: hashOf(["run", run.id, "rollout", params.stage, params.step, row], query), "aria-label": label },
          text,
        )
      : h("span", { class: "dim" }, text);
  return h(
    "div",
    { class: "bar" },
    h(
      "h2",
      {},
      `${query.of === "eval" ? "Evaluation" : "Rollout"} ${visible(params.row)} of `,
      link(
        ["run", run.id, "rollouts"],
        { stage: params.stage, step_from: params.step, step_to: params.step },
        `${visible(params.stage)} step ${visible(params.step)}`,
      ),
    ),
    to(Number(params.row) - 1, "‹ previous", "previous rollout"),
    to(Number(params.row) + 1, "next ›", "next rollout"),
    h("span", { class: "dim" }, "j k other rollouts, t x m i views, c colour, Escape back"),
  );
}

function summary(run, params, rollout, of) {
  const group = rollout.group;
  const sampled = rollout.mask.reduce((sum, one) => sum + one, 0);
  const parts = Object.entries(rollout.reward_parts ?? {});
  return [
    rollout.error ? h("p", { class: "error", data: { fault: "" } }, visible(rollout.error)) : null,
    facts([
      ["reward", h("b", {}, number(rollout.reward))],
      ["advantage", number(rollout.advantage)],
      ["sampled tokens", number(sampled)],
      ["all tokens", number(rollout.token_ids.length)],
      ["turns", number((rollout.turns ?? []).length)],
      ["strands", rollout.strand_tokens.length > 1 ? rollout.strand_tokens.length : null],
      ["finish reason", visible(rollout.finish_reason)],
      ["stop reason", rollout.stop_reason && visible(rollout.stop_reason)],
      ["source", visible(rollout.source)],
      [
        "task",
        of
          ? `${rollout.uid}·${rollout.index}`
          : link(
              ["run", run.id, "group", params.stage, params.step, rollout.uid],
              {},
              `${rollout.uid}·${rollout.index}`,
            ),
      ],
      [
        "group",
        group?.rewards?.length > 1 && !of
          ? [
              sparkline(group.rewards, group.rows.indexOf(Number(params.row))),
              h("span", { class: "unseen" }, group.rewards.map((one) => number(one)).join(", ")),
            ]
          : null,
      ],
      [
        "answer",
        rollout.answer === null || rollout.answer === undefined
          ? null
          : h(
              "code",
              {},
              visible(typeof rollout.answer === "string" ? rollout.answer : JSON.stringify(rollout.answer)),
            ),
      ],
      ["extracted", rollout.extracted === null ? null : h("code", {}, visible(rollout.extracted))],
    ]),
    parts.length > 0 && facts(parts.map(([name, value]) => [visible(name), number(value)])),
  ];
}

function commandsOf(rollout) {
  const entries = Object.entries(rollout.commands ?? {}).filter(([, text]) => text);
  return entries.length
    ? panel(
        "Commands",
        {},
        entries.map(([name, text]) => h("div", { class: "checkpoint" }, h("b", {}, visible(name)), command(text))),
      )
    : null;
}

// ---------------------------------------------------------------- tokens

/** How the values of a strand become colours: {color(value), legend}. Values of a class have a colour each. */
function scaleOf(how, tokens) {
  const values = tokens.map(how.of).filter((value) => value !== null && value !== undefined && Number.isFinite(value));
  if (!values.length) return { color: () => [0, 0, 0], key: ["not recorded"] };
  if (how.kind === "class") {
    const classes = [...new Set(values)].sort((a, b) => a - b);
    const color = (value) => {
      const n = classes.indexOf(value);
      return classes.length > 8 ? sequential(n / (classes.length - 1)) : apart(n);
    };
    const of =
      { mask: { 0: "0: not sampled", 1: "1: sampled" }, strand: { 0: "shared with an earlier strand" } }[how.name] ??
      {};
    return {
      color,
      key: classes
        .slice(0, 12)
        .map((value) =>
          keyBox(color(value), of[value] ?? (how.name === "strand" ? `strand ${value - 1}` : `${how.name} ${value}`)),
        ),
    };
  }
  const ordered = values.slice().sort((a, b) => a - b);
  if (how.kind === "sequential") {
    // The lowest hundredth would leave one colour for all others.
    const low = Math.min(quantile(ordered, 0.01), how.name === "log-prob" ? -0.1 : 0);
    const high = how.name === "log-prob" ? 0 : Math.max(quantile(ordered, 0.99), 1e-6);
    const color = (value) => sequential((value - low) / (high - low || 1));
    return { color, key: [gradient(color, low, high, how.unit)] };
  }
  const of = how.kind === "ratio" ? Math.log : (value) => value;
  const most = Math.max(
    ...[0.01, 0.99].map((share) => Math.abs(of(quantile(ordered, share)))),
    how.kind === "ratio" ? 0.01 : 1e-3,
  );
  const color = (value) => diverging(of(value) / most);
  return {
    color,
    key: [
      gradient((value) => diverging(value / most), -most, most, how.unit, how.kind === "ratio" ? Math.exp : undefined),
    ],
  };
}

function gradient(color, low, high, unit, text = (value) => value) {
  const [width, count] = [180, 45];
  return h(
    "span",
    { class: "gradient" },
    number(text(low), 3),
    svg(
      "svg",
      { width, height: 12, "aria-hidden": "true" },
      Array.from({ length: count }, (_, n) =>
        svg("rect", {
          x: (n * width) / count,
          width: width / count + 0.5,
          height: 12,
          fill: css(color(low + ((n + 0.5) / count) * (high - low))),
        }),
      ),
    ),
    `${number(text(high), 3)} ${unit}`,
  );
}

function keyBox(color, text) {
  return h(
    "span",
    {},
    svg(
      "svg",
      { width: 12, height: 12, "aria-hidden": "true" },
      svg("rect", { width: 12, height: 12, rx: 2, fill: css(color) }),
    ),
    text,
  );
}

/** The tokens of a strand, coloured. The card of one shows with the pointer on it, and with the arrow keys. */
function tokensView(strand, state) {
  const how = COLORS[state.color];
  const { color, key } = scaleOf(how, strand.tokens);
  const card = h("div", { class: "card", role: "status", hidden: true, data: { card: "" } });
  const flow = h("div", {
    class: `tokens ${state.numbers ? "numbered" : ""}`,
    tabindex: 0,
    role: "list",
    "aria-label": `tokens of the strand by ${how.name}; arrow keys move`,
    data: { tokens: strand.tokens.length, color: state.color },
  });
  let at = -1;
  let pointed = false;

  function element(token, n) {
    const value = how.of(token) ?? null;
    const text = token.text === null ? String(token.id) : blanks(token.text);
    const span = h(
      "span",
      {
        class: [
          "token",
          token.mask && "sampled",
          token.shared && "shared",
          token.text === null && "id",
        ]
          .filter(Boolean)
          .join(" "),
        role: "listitem",
        data: { n, value: value === null ? null : number(value) },
      },
      text || "∅",
      state.numbers && h("small", {}, value === null ? " " : number(value, 2)),
    );
    if (value !== null && Number.isFinite(value)) {
      const shade = color(value);
      span.style.backgroundColor = css(shade);
      span.style.color = ink(shade);
    }
    return span;
  }

  function append(from) {
    if (from > 0 && !flow.isConnected) return;
    const part = document.createDocumentFragment();
    for (let n = from; n < Math.min(from + AT_ONCE, strand.tokens.length); n++) {
      const token = strand.tokens[n];
      if (n === strand.shared && n > 0)
        part.append(
          h(
            "span",
            { class: "fork", role: "listitem", data: { fork: n } },
            `↳ forks from strand ${strand.from} at ${n}`,
          ),
        );
      part.append(element(token, n));
      if (token.text?.includes("\n")) part.append(h("br"));
    }
    flow.append(part);
    if (from + AT_ONCE < strand.tokens.length) setTimeout(() => append(from + AT_ONCE));
  }

  function show(span) {
    flow.querySelector(".current")?.classList.remove("current");
    if (!span) {
      card.hidden = true;
      return;
    }
    span.classList.add("current");
    at = Number(span.dataset.n);
    put(card, cardOf(strand.tokens[at]));
    card.hidden = false;
    const place = span.getBoundingClientRect();
    card.style.left = `${Math.max(Math.min(place.left, innerWidth - card.offsetWidth - 12), 4)}px`;
    card.style.top =
      place.bottom + card.offsetHeight + 10 < innerHeight
        ? `${place.bottom + 6}px`
        : `${place.top - card.offsetHeight - 6}px`;
  }

  // A pointer that rests, while the keys move, hides nothing.
  const point = (span) => {
    if (span || pointed) show(span);
    pointed = Boolean(span);
  };
  flow.addEventListener("pointerover", (event) => point(event.target.closest(".token")));
  flow.addEventListener("pointerleave", () => point(null));
  flow.addEventListener("blur", () => show(null));
  flow.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    const next = Math.min(Math.max(at + by, 0), strand.tokens.length - 1);
    const span = flow.querySelector(`[data-n="${next}"]`);
    span?.scrollIntoView({ block: "nearest" });
    pointed = false;
    show(span);
    event.preventDefault();
  });
  append(0);
  const none = strand.tokens.every((token) => token.text === null);
  const untold = strand.tokens.some((token) => token.mask) && strand.tokens.every((token) => token.trainer === null);
  return [
    h(
      "div",
      { class: "legend", data: { legend: state.color } },
      h("span", { class: "dim" }, `${how.name}:`),
      key,
      h("span", { class: "dim" }, how.told),
    ),
    h(
      "div",
      { class: "legend" },
      h("span", {}, h("span", { class: "token sampled" }, "underlined"), "sampled by the policy"),
      h(
        "span",
        { class: "dim" },
        none
          ? "The run has no tokenizer yet: tokens are shown as ids."
          : "· blank, ↵ new line, → tab, ⟨200E⟩ an invisible character",
      ),
      untold &&
        h(
          "span",
          { class: "dim" },
          "The trainer's log-probs of this step are not recorded: see track.batches_interval.",
        ),
    ),
    flow,
    card,
  ];
}

function cardOf(token) {
  const entries = [
    ["place", number(token.place)],
    ["id", token.id],
    ["text", token.text === null ? null : h("code", {}, blanks(token.text))],
    ["mask", token.mask ? "1, sampled" : "0"],
    [
      "log-prob",
      token.logprob === null ? null : `${fixed(token.logprob, 5)}  (p ${number(Math.exp(token.logprob), 3)})`,
    ],
    [
      "sampled with",
      token.sampled === null ? null : `${fixed(token.sampled, 5)}  (p ${number(Math.exp(token.sampled), 3)})`,
    ],
    ["trainer", token.trainer === null ? null : fixed(token.trainer, 5)],
    ["reference", token.reference === null ? null : fixed(token.reference, 5)],
    ["difference", token.trainer === null ? null : fixed(COLORS.difference.of(token), 5)],
    ["ratio", token.trainer === null ? null : fixed(COLORS.ratio.of(token), 5)],
    ["entropy", token.entropy === null ? null : fixed(token.entropy, 4)],
    ["advantage", token.advantage === null ? null : fixed(token.advantage, 4)],
    ["version", token.mask ? token.version : null],
  ];
  return facts(entries);
}

function textView(rollout, strand) {
  const known = strand?.tokens.some((token) => token.text !== null);
  if (!known)
    return [
      h("h3", {}, "prompt"),
      h("pre", { class: "text", tabindex: 0 }, visible(rollout.prompt)),
      h("h3", {}, "reply"),
      h("pre", { class: "text", tabindex: 0, data: { text: "" } }, visible(rollout.text)),
    ];
  const parts = [];
  for (const token of strand.tokens) {
    const last = parts[parts.length - 1];
    if (last && last.mask === token.mask) last.text.push(token.text ?? "");
    else parts.push({ mask: token.mask, text: [token.text ?? ""] });
  }
  return h(
    "pre",
    { class: "text", tabindex: 0, data: { text: "" } },
    parts.map((part) => h("span", { class: part.mask ? "sampled" : "dim" }, visible(part.text.join("")))),
  );
}
