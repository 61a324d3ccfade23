// The phases of a request, in groups that have one color each.

import { make } from "./dom.js";
import { seconds } from "./format.js";

const GROUPS = [
  ["frontend", "Frontend", ["receive", "tokenize_queue", "load", "tokenize", "frontend_queue", "select", "reserve"]],
  ["retry", "Retry, migration", ["retry", "migration"]],
  ["network", "To workers and back", ["send", "first_token"]],
  ["queue", "Worker's queue", ["queue", "submit", "grammar"]],
  ["prefill", "Prefill", ["prefill", "export"]],
  ["kv_transfer", "KV transfer", ["kv_transfer"]],
  ["decode", "Decode", ["decode_wait", "decode"]],
  ["respond", "Response", ["respond"]],
];
const ORDER = ["receive", "tokenize_queue", "load", "tokenize", "frontend_queue", "select", "reserve", "retry", "send",
  "grammar", "submit", "queue", "prefill", "export", "kv_transfer", "first_token", "decode_wait", "decode",
  "migration", "respond"];

const UNTIL_ERROR = "until the error";

export const GROUP_NAMES = Object.fromEntries(GROUPS.map(([group, name]) => [group, name]));
export const groupOf = phase => (GROUPS.find(([, , phases]) => phases.includes(phase)) || ["network"])[0];

/** Return [role, phase, seconds] in the order in which phases come. */
export function inOrder(phases) {
  const place = phase => (ORDER.includes(phase) ? ORDER.indexOf(phase) : ORDER.length);
  const roles = ["frontend", "prefill", "prefill_and_decode", "decode"];
  // The prefill call comes before the decode call. What follows the first token is in one order for all roles.
  const rank = ([role, phase]) => {
    if (place(phase) >= ORDER.indexOf("decode_wait")) return 1000 + place(phase);
    return 100 * roles.indexOf(role) + place(phase);
  };
  return [...phases].sort((one, other) => rank(one) - rank(other));
}

/** Return a bar of phases. `total`: their seconds; `scale`: those of the whole width. */
export function phaseBar(phases, total, scale) {
  const bar = make("span", { class: "bar", role: "img", "aria-label": `${seconds(total)} in ${phases.length} phases` });
  // A request that failed early has no phases.
  const parts = phases.length ? inOrder(phases) : [["frontend", UNTIL_ERROR, total]];
  for (const [role, phase, s] of parts) {
    const group = phase === UNTIL_ERROR ? "bad" : groupOf(phase);
    const part = make("span", { class: `phase ${group}`, title: `${phase}${role && ` (${role})`}: ${seconds(s)}` });
    part.style.width = `${(100 * s) / scale}%`;
    bar.append(part);
  }
  return bar;
}

/** Return a list of the phases with their times. */
export function phaseList(phases) {
  const total = phases.reduce((sum, [, , s]) => sum + s, 0) || 1;
  return make("ul", { class: "phase-list" }, inOrder(phases).filter(([, , s]) => s >= 0.00005).map(([role, phase, s]) =>
    make("li", {},
      make("span", { class: `swatch ${groupOf(phase)}` }), `${phase} `,
      make("span", { class: "soft" }, role), " ",
      make("b", {}, seconds(s)), make("span", { class: "soft" }, ` ${Math.round((100 * s) / total)}%`))));
}

export function legend(groups) {
  return groups.map(group => make("li", {}, make("span", { class: `swatch ${group}` }), GROUP_NAMES[group]));
}

export const ALL_GROUPS = GROUPS.map(([group]) => group);
