// When to read on and when to write, as leap/runtime/streaming/policies.py has it.

import { LeapError } from "./errors.js";

const PATIENCE = 16; // Chunks to look back for the most attended.

/** The policy of a name; the ratio is that of a wait, where the name tells none. */
export function readPolicy(name, ratio) {
  const [, kind, number, steps] = /^(wait|agree|align|tail)-(\d+|0?\.\d+)(?:\/(\d+))?$/.exec(name) ?? [];
  const n = Number(number);
  const usual = { name, drafts: 0, window: 0, tooNew: 0, isOffline: false, trusts: () => true };
  const fewer = (nRead, nWritten) => nWritten < nRead;
  const whole = Number.isInteger(n);
  if (name === "offline") return { ...usual, isOffline: true, mayWrite: () => false };
  if (kind === "wait" && whole && n >= 1 && steps !== "0") {
    const each = Number(steps ?? ratio);
    return { ...usual, mayWrite: (nRead, nWritten) => nRead >= each * (nWritten + n) };
  }
  if (steps === undefined) {
    if (kind === "agree" && whole && n >= 2) return { ...usual, drafts: n, mayWrite: fewer };
    if (kind === "align" && whole && n >= 1 && n < PATIENCE) {
      const trusts = (attention) => mostAttended(attention) >= n;
      return { ...usual, window: PATIENCE, tooNew: n, mayWrite: fewer, trusts };
    }
    if (kind === "tail" && n > 0 && n <= 1) {
      const trusts = (attention) => attention.reduce((a, b) => a + b, 0) < n;
      return { ...usual, window: 2, tooNew: 2, mayWrite: fewer, trusts };
    }
  }
  throw new LeapError(
    `no policy is called ${name}; there are wait-3 (wait-3/4 with a ratio), offline, agree-2, align-2 and tail-0.3`,
  );
}

/** Which of the last chunks, the newest first, or all before them, has the most attention. */
function mostAttended(attention) {
  const all = [...attention, 1 - attention.reduce((a, b) => a + b, 0)];
  return all.indexOf(Math.max(...all));
}
