// The manifest.json of an exported model, as leap/runtime/manifest.py describes it.

import { LeapError, firstLine } from "./errors.js";

const FORMAT = "leap-export";
const RUNTIME = "onnxruntime";
const VERSION = 1;
const TYPES = ["float32", "float64", "int64", "bool"];
/** What the name of a state begins with where a graph gives it back. */
export const NEXT = "next.";
export const AGAIN = "make it again with leap export";

/** The manifest of an exported model of one of some tasks. */
export async function readManifest(folder, ...tasks) {
  const bytes = await folder.read("manifest.json");
  if (bytes === null) throw new LeapError(`no exported model at ${folder.name}; make one with leap export`);
  const path = `${folder.name}/manifest.json`;
  const found = parseJson(bytes, path);
  if (found?.format !== FORMAT) {
    throw new LeapError(`${path} is no manifest of an exported model; give a folder of leap export`);
  }
  if ((found.runtime ?? RUNTIME) !== RUNTIME) {
    throw new LeapError(`${folder.name} was exported for ${found.runtime}; export it without --to`);
  }
  if (found.version !== VERSION) {
    throw new LeapError(
      `${folder.name} was exported in version ${found.version} of the format, and this is version ${VERSION}; ${AGAIN}`,
    );
  }
  if (!tasks.includes(found.task)) {
    const wanted = tasks.join(" or ");
    throw new LeapError(`${folder.name} holds a model for ${found.task}, and one for ${wanted} is wanted here`);
  }
  const broken = mistake(found);
  if (broken) throw new LeapError(`${path} does not tell what it should (${broken}); ${AGAIN}`);
  for (const each of found.states) each.fill = Number(String(each.fill).replace("inf", "Infinity"));
  return found;
}

/** The JSON of a file's bytes. */
export function parseJson(bytes, path) {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new LeapError(`${path} is not a whole JSON file (${firstLine(error)}); ${AGAIN}`);
  }
}

/** What is wrong with a manifest, or nothing. */
function mistake({ task, states, graphs, at_once, n_positions, vocabulary, tokenizer, translation }) {
  const whole = (x) => Number.isInteger(x) && x > 0;
  const strings = (x) => Array.isArray(x) && x.every((each) => typeof each === "string");
  const isState = (each) =>
    typeof each?.name === "string" &&
    TYPES.includes(each.type) &&
    Array.isArray(each.shape) &&
    each.shape.every((x) => x === "batch" || x === "tokens" || (Number.isInteger(x) && x >= 0)) &&
    ["number", "string"].includes(typeof each.fill);
  const isGraph = (each) => typeof each?.file === "string" && strings(each.inputs) && strings(each.outputs);
  if (!Array.isArray(states) || !states.every(isState)) return "states";
  if (!graphs || !Object.values(graphs).every(isGraph)) return "graphs";
  if (!whole(at_once)) return "at_once";
  if (n_positions !== null && !whole(n_positions)) return "n_positions";
  if (!whole(vocabulary)) return "vocabulary";
  if (typeof tokenizer?.file !== "string") return "tokenizer";
  if (task === "lm" && !Number.isInteger(tokenizer.end)) return "tokenizer";
  if (task !== "lm" && typeof translation !== "object") return "translation";
  return null;
}
