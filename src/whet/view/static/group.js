/* The rollouts of one task side by side: what they share, what they were paid for, which were dropped. */

import { facts, h, number, panel, right, table, visible } from "./dom.js";
import { get, ofRun } from "./api.js";
import { sparkline } from "./plot.js";
import { hashOf, link, rolloutLink } from "./route.js";

/** How many characters all texts begin with. Half of a pair is not cut off. */
export function commonPrefix(texts) {
  if (texts.length < 2) return 0;
  let n = 0;
  while (n < texts[0].length && texts.every((text) => text[n] === texts[0][n])) n++;
  return n > 0 && /[\ud800-\udbff]/.test(texts[0][n - 1]) ? n - 1 : n;
}

export async function groupPage(context) {
  const { run, params } = context;
  const answer = await get(ofRun(run.id, "groups", params.stage, params.step, params.uid));
  const rows = answer.rows;
  const texts = rows.map((row) => visible(row.text));
  const common = commonPrefix(texts);
  const parts = [...new Set(rows.flatMap((row) => Object.keys(row.reward_parts ?? {})))];
  const rewards = rows.map((row) => row.reward);
  const known = rewards.filter((value) => value !== null);
  const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  const spread = known.length
    ? Math.sqrt(known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / known.length)
    : null;
  const sampled = (row) => row.mask.reduce((sum, one) => sum + one, 0);
  context.keys({
    Escape: () => {
      location.hash = hashOf(["run", run.id, "rollouts"], {
        stage: params.stage,
        step_from: params.step,
        step_to: params.step,
      });
    },
  });
  return [
    h(
      "div",
      { class: "bar" },
      h(
        "h2",
        {},
        `Group of task ${visible(params.uid)} in `,
        link(
          ["run", run.id, "rollouts"],
          { stage: params.stage, step_from: params.step, step_to: params.step, uid: params.uid },
          `${visible(params.stage)} step ${visible(params.step)}`,
        ),
      ),
      sparkline(rewards),
    ),
    facts([
      ["rollouts", rows.length],
      ["mean reward", number(mean)],
      ["standard deviation", number(spread)],
      ["source", visible(rows[0]?.source)],
      ["answer", rows[0]?.answer === null || !rows[0] ? null : h("code", {}, visible(JSON.stringify(rows[0].answer)))],
    ]),
    answer.note && h("p", { class: "note", data: { note: "" } }, visible(answer.note)),
    panel("Prompt", {}, h("pre", { class: "text", tabindex: 0 }, visible(rows[0]?.prompt))),
    panel(
      "Rewards",
      {},
      table(
        [
          "rollout",
          right("reward"),
          right("advantage"),
          right("tokens"),
          "ended by",
          ...parts.map((part) => right(visible(part))),
        ],
        rows.map((row) => [
          rolloutLink(run.id, params.stage, params.step, row.row, `row ${row.row}, index ${row.index}`),
          row.reward,
          row.advantage,
          sampled(row),
          visible(row.stop_reason ?? row.finish_reason),
          ...parts.map((part) => number(row.reward_parts?.[part])),
        ]),
        { "data-table": "group" },
      ),
    ),
    panel(
      "Replies side by side",
      {},
      common > 0 &&
        h("p", { class: "dim", data: { common } }, `All begin with the same ${number(common)} characters (dimmed).`),
      h(
        "div",
        { class: "side-by-side", data: { columns: rows.length } },
        rows.map((row, n) =>
          h(
            "article",
            { class: "reply-column" },
            h(
              "header",
              {},
              rolloutLink(run.id, params.stage, params.step, row.row, `index ${row.index}`),
              h("b", {}, `reward ${number(row.reward, 3)}`),
              h("span", { class: "dim" }, `advantage ${number(row.advantage, 3)}`),
            ),
            row.error && h("p", { class: "error" }, visible(row.error)),
            h("div", { class: "said" }, h("span", { class: "dim" }, texts[n].slice(0, common)), texts[n].slice(common)),
          ),
        ),
      ),
    ),
  ];
}
