// Words to subwords and back, as leap/runtime/streaming/vocabulary.py does it.

import { Tokenizer } from "./vendor/tokenizers.mjs";
import { Charsmap } from "./charsmap.js";
import { LeapError, firstLine } from "./errors.js";
import { AGAIN, parseJson } from "./manifest.js";
import { splitWords } from "./words.js";

export const [BOS, PAD, EOS, UNK] = [0, 1, 2, 3];
export const SPACE = "▁"; // What a subword begins with where a word begins.
const SPECIAL = [BOS, PAD, EOS, UNK];

/** The subwords of an exported translation model. */
export async function readSubwords(folder, { file }, size) {
  const path = `${folder.name}/${file}`;
  const bytes = await folder.read(file);
  if (bytes === null) throw new LeapError(`${path} is missing; ${AGAIN}`);
  const json = parseJson(bytes, path);
  let found;
  try {
    found = new Subwords(json);
  } catch (error) {
    throw new LeapError(`${path} is no tokenizers file (${firstLine(error)})`);
  }
  if (found.pieces.length !== size) {
    throw new LeapError(
      `the model in ${folder.name} knows ${size} subwords, and its tokenizer ${found.pieces.length}; ${AGAIN}`,
    );
  }
  return found;
}

export class Subwords {
  constructor(json) {
    const { vocab } = json.model;
    this.pieces = [];
    if (Array.isArray(vocab)) vocab.forEach(([piece], id) => (this.pieces[id] = piece));
    else for (const [piece, id] of Object.entries(vocab)) this.pieces[id] = piece;
    for (const { id, content } of json.added_tokens ?? []) this.pieces[id] = content;
    const added = (json.added_tokens ?? []).filter((each) => !each.special); // A text about </s> does not end there.
    const map = json.normalizer?.precompiled_charsmap;
    this.map = map ? new Charsmap(map) : null;
    const normalizer = map ? null : json.normalizer;
    this.tokenizer = new Tokenizer({ ...json, normalizer, added_tokens: added }, { clean_up_tokenization_spaces: false });
    this.space = this.pieces.indexOf(SPACE);
  }

  /** Subwords of a text, without an end. */
  encode(text) {
    const spaced = splitWords(text).join(" ");
    const normal = this.map ? this.map.normalise(spaced) : spaced;
    return normal ? this.tokenizer.encode(normal, { add_special_tokens: false }).ids : [];
  }

  /** What puts subwords together to words, as they come. */
  words() {
    let held = [];
    const finish = () => {
      const word = held.map((piece) => this.pieces[piece]).join("").replaceAll(SPACE, "");
      held = [];
      return word ? [word] : [];
    };
    const push = (piece) => {
      if (SPECIAL.includes(piece)) return [];
      const complete = this.pieces[piece].startsWith(SPACE) ? finish() : [];
      held.push(piece);
      return complete;
    };
    return { push, finish, nHeld: () => held.length };
  }
}
