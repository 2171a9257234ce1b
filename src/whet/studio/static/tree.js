/* The schema's nodes and the values that stand at them. No key is named here: all that is known comes from the schema. */

/** The kinds of value that a node allows, each by itself. */
export function options(node) {
  return node.anyOf ? node.anyOf.flatMap(options) : [node];
}

/** The node of a section: the kind that has keys; null for other nodes. */
export function sectionOf(node) {
  return options(node).find((one) => one.properties) ?? null;
}

/** Of a list of sections or of sections by name: {list, node of an entry}; null for other nodes. */
export function entriesOf(node) {
  for (const one of options(node)) {
    if (one.type === "array" && one.items && sectionOf(one.items)) return { list: true, node: one.items };
    if (one.additionalProperties && sectionOf(one.additionalProperties)) return { list: false, node: one.additionalProperties };
  }
  return null;
}

/** Whether null is allowed. */
export function nullable(node) {
  return options(node).some((one) => one.type === "null");
}

/** The choices of a node whose values name functions with settings. */
export function functionsOf(node) {
  return node["x-choices"]?.some((one) => one.settings) ? node["x-choices"] : null;
}

/** How a single value is edited: {kind: "choice", values}, {kind: "text"} or {kind: "yaml"}. */
export function kindOf(node) {
  const kinds = options(node);
  const values = kinds.flatMap((one) => one.enum ?? (one.const !== undefined ? [one.const] : one.type === "boolean" ? [true, false]
    : one.type === "null" ? [] : [undefined]));
  if (!values.includes(undefined)) return { kind: "choice", values: nullable(node) && node.default !== null ? [...values, null] : values };
  const plain = kinds.filter((one) => one.type !== "null");
  return plain.length === 1 && plain[0].type === "string" ? { kind: "text" } : { kind: "yaml" };
}

/** The value of a section, where a short form stands in its place. */
export function long(value, node) {
  if (functionsOf(node)) return typeof value === "string" ? { name: value } : value;
  const section = sectionOf(node);
  const short = node["x-short"] ?? section?.["x-short"];
  if (typeof value === "string" && short) return long({ [short]: value }, { ...node, "x-short": null });
  const entries = entriesOf(node);
  if (entries?.list && (typeof value === "string" || isSection(value))) return [value];
  return value;
}

export function isSection(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** The value at a path of plain values, short forms as they are. */
export function at(tree, path) {
  return path.reduce((value, part) => (value === null || typeof value !== "object" ? undefined : value[part]), tree);
}

/** The value below a key of a section. */
export function below(value, name) {
  return isSection(value) || Array.isArray(value) ? value[name] : undefined;
}

/** How many values are given in a tree. */
export function count(value) {
  if (value === undefined) return 0;
  if (value === null || typeof value !== "object") return 1;
  const inner = Object.values(value);
  return inner.length ? inner.reduce((sum, one) => sum + count(one), 0) : 1;
}

const PLAIN = /^[A-Za-z_./~$][\w./~$@+-]*$/;
const WORDS = new Set(["null", "true", "false", "yes", "no", "on", "off", "nan", "inf"]);

/** A value on one line, as YAML would have it. */
export function yaml(value) {
  if (value === undefined) return "";
  if (typeof value === "string") return PLAIN.test(value) && !WORDS.has(value.toLowerCase()) ? value : JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(yaml).join(", ")}]`;
  if (isSection(value)) return `{${Object.entries(value).map(([key, one]) => `${yaml(key)}: ${yaml(one)}`).join(", ")}}`;
  return String(value);
}

/** Whether two plain values are equal. */
export function same(one, other) {
  return JSON.stringify(one) === JSON.stringify(other);
}

/** A path as people write it: data.train[0].path. */
export function dotted(path) {
  return path.reduce((text, part) => (typeof part === "number" ? `${text}[${part}]` : text ? `${text}.${part}` : part), "");
}

/** Whether a pattern of a rule (`*` for any name or entry) is about a path or a section around it. */
export function covers(pattern, path) {
  const parts = pattern.split(".");
  return parts.length <= path.length && parts.every((part, n) => part === "*" || part === String(path[n]));
}
