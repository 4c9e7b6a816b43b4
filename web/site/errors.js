/** What whoever uses the page can put right: one sentence, which the page shows. */
export class LeapError extends Error {}

/** The first line of whatever was thrown. */
export function firstLine(error) {
  return (String(error?.message ?? error).trim() || "no reason given").split("\n")[0];
}
