/* What was said in an episode: one card for each message, with what is known of the turn that it was. */

import { duration, facts, h, line, number, visible } from "./dom.js";

const LONG = 1200;
/** As `fit` of whet.envs.tools writes it in place of what it took out of a result. */
const CUT = /\[\.\.\. \d+ characters cut \.\.\.\]/;
const OF_TURN = ["strand", "start", "end", "finish_reason", "reward", "calls", "malformed"];

/** The cards of a rollout's conversation. Replies of the policy and its turns are in the same order. */
export function transcript(rollout, strands) {
  const messages = rollout.messages ?? [];
  const turns = rollout.turns ?? [];
  if (!messages.length)
    return h(
      "div",
      { class: "transcript" },
      messageCard("prompt", rollout.prompt),
      replyCard({ role: "assistant", content: rollout.text }, turns[0], 0, rollout),
    );
  let turn = 0;
  let strand = 0;
  const cards = [messageCard("prompt", rollout.prompt)];
  for (const message of messages) {
    if (message.role !== "assistant") {
      cards.push(messageCard(message.role, message.content, message));
      continue;
    }
    const told = turns[turn];
    if (told && told.strand !== strand) {
      strand = told.strand;
      const { from, shared } = strands[strand] ?? {};
      cards.push(
        h(
          "div",
          { class: "fork", data: { fork: shared ?? 0 } },
          `↳ strand ${strand}`,
          from !== null && from !== undefined ? `, forks from strand ${from} at token ${shared}` : ", starts from the beginning",
        ),
      );
    }
    cards.push(replyCard(message, told, turn, rollout));
    turn += 1;
  }
  return h("div", { class: "transcript", data: { turns: turns.length } }, cards);
}

function body(text) {
  const whole = visible(text);
  if (whole.length <= LONG) return h("div", { class: "said" }, whole);
  return h(
    "details",
    { class: "long" },
    h("summary", {}, `${line(text, 200)} `, h("span", { class: "dim" }, `${number(whole.length)} characters`)),
    h("div", { class: "said" }, whole),
  );
}

/** A message of anybody but the policy. */
function messageCard(role, text, message = {}) {
  return h(
    "article",
    { class: `turn ${["tool", "user", "system", "prompt"].includes(role) ? role : "other"}`, data: { role } },
    h(
      "header",
      {},
      h("b", {}, role === "tool" ? `result${message.name ? ` of ${visible(message.name)}` : ""}` : visible(role)),
      message.tool_call_id && h("span", { class: "dim" }, visible(message.tool_call_id)),
      CUT.test(text ?? "") && h("span", { class: "flag" }, "cut"),
    ),
    body(text),
  );
}

/** How long a reply was sampled, and how long its environment took. */
function times(pair) {
  if (!pair) return null;
  const [sampled, answered] = pair;
  const text = `${duration(sampled)} sampling${answered ? `, ${duration(answered)} environment` : ""}`;
  return h("span", { class: "dim", data: { seconds: "" }, title: "seconds of this run; equal runs differ in them" }, text);
}

/** A reply of the policy, with its turn. */
function replyCard(message, turn, place, rollout) {
  const more = Object.entries(turn ?? {}).filter(
    ([name, value]) => !OF_TURN.includes(name) && value !== null && typeof value !== "object",
  );
  const malformed = turn?.malformed ?? message.malformed;
  return h(
    "article",
    { class: "turn assistant", data: { role: "assistant", turn: place } },
    h(
      "header",
      {},
      h("b", {}, `turn ${place + 1}`),
      turn && h("span", { class: "dim" }, `${turn.end - turn.start} tokens, ${visible(turn.finish_reason)}`),
      times(rollout.seconds?.[place]),
      turn?.reward !== null && turn?.reward !== undefined && h("span", {}, `reward ${number(turn.reward)}`),
      more.map(([name, value]) =>
        h("span", { class: "dim" }, `${visible(name)} ${typeof value === "number" ? number(value) : visible(value)}`),
      ),
      malformed ? h("span", { class: "flag", title: visible(malformed) }, "malformed") : null,
    ),
    message.reasoning_content &&
      h(
        "details",
        { class: "thought", data: { thought: "" } },
        h("summary", {}, `thought, ${number(message.reasoning_content.length)} characters`),
        h("div", { class: "said" }, visible(message.reasoning_content)),
      ),
    message.content && body(message.content),
    (message.tool_calls ?? []).map(callOf),
    malformed && h("p", { class: "warn" }, visible(malformed)),
  );
}

function callOf(call) {
  const wanted = call.function?.arguments ?? call.arguments ?? {};
  const entries = typeof wanted === "object" && wanted !== null ? Object.entries(wanted) : [["arguments", wanted]];
  return h(
    "div",
    { class: "call", data: { call: visible(call.function?.name ?? call.name) } },
    h(
      "header",
      {},
      "call ",
      h("b", {}, visible(call.function?.name ?? call.name)),
      call.id && h("span", { class: "dim" }, visible(call.id)),
    ),
    facts(
      entries.map(([name, value]) => [
        visible(name),
        h("code", {}, visible(typeof value === "string" ? value : JSON.stringify(value))),
      ]),
    ),
  );
}
