// Text to tokens and back, as leap/runtime/text.py does it.

import { Tokenizer } from "./vendor/tokenizers.mjs";
import { LeapError, firstLine } from "./errors.js";
import { AGAIN, parseJson } from "./manifest.js";

const encoder = new TextEncoder();

/** The tokenizer of an exported model. */
export async function readCodec(folder, told) {
  const path = `${folder.name}/${told.file}`;
  const bytes = await folder.read(told.file);
  if (bytes === null) throw new LeapError(`${path} is missing; ${AGAIN}`);
  const found = parseJson(bytes, path);
  if (told.fingerprint !== (await fingerprint(bytes, told.fingerprint))) {
    throw new LeapError(`the tokenizer in ${folder.name} is not the model's own; ${AGAIN}`);
  }
  try {
    return new TextCodec(found, told);
  } catch (error) {
    throw new LeapError(`${path} is no tokenizers file (${firstLine(error)})`);
  }
}

/** The beginning of the hash of a file; where the browser has none (pages without https), what is expected. */
async function fingerprint(bytes, expected) {
  if (!globalThis.crypto?.subtle) return expected;
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(hash.slice(0, 8), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A tokenizer as language modelling uses it. */
export class TextCodec {
  constructor(json, { end, spells_line_ends: spellsLineEnds }) {
    const added = json.added_tokens ?? [];
    this.special = new Set(added.filter((each) => each.special).map((each) => each.id));
    this.end = end;
    this.spellsLineEnds = spellsLineEnds;
    // A text about <|endoftext|> does not end there.
    const read = spellsLineEnds ? added.filter((each) => !each.special) : added;
    this.tokenizer = new Tokenizer({ ...json, added_tokens: read }, { clean_up_tokenization_spaces: false });
  }

  /** Tokens of some text, without an end. */
  tokens(text) {
    if (this.spellsLineEnds) return this.encode(text);
    return text.split("\n").flatMap((line, i) => [...(i ? [this.end] : []), ...this.encode(line)]);
  }

  /** A function that takes one token after another, and gives the text each one completes. */
  stream() {
    let ids, prefix, at;
    const begin = () => ([ids, prefix, at] = [[], "", 0]);
    begin();
    return (token) => {
      if (token === this.end && !this.spellsLineEnds) {
        begin();
        return "\n";
      }
      if (!prefix && ids.length) {
        const before = this.decode(ids);
        if (!before.endsWith("\ufffd")) [prefix, at] = [before, ids.length];
      }
      ids.push(token);
      const text = this.decode(ids);
      if (text.endsWith("\ufffd") || encoder.encode(text).length <= encoder.encode(prefix).length) return "";
      const piece = text.slice(prefix.length);
      ids = ids.slice(at);
      prefix = this.decode(ids);
      at = ids.length;
      return piece;
    };
  }

  encode(text) {
    return text ? this.tokenizer.encode(text, { add_special_tokens: false }).ids : [];
  }

  decode(ids) {
    const spelt = ids.filter((id) => !this.special.has(id));
    return spelt.length ? this.tokenizer.decode(spelt) : "";
  }
}

/** The text that follows a prompt, token by token. */
export class Continuation {
  constructor(codec, prompt, read) {
    this.decode = codec.stream();
    // What was read is decoded too, else SentencePiece would take what follows for the first word of a text.
    const before = read.map((token) => this.decode(token)).join("");
    // A space that ends a prompt is one that SentencePiece does not read.
    this.spaceGiven = prompt.endsWith(" ") && !before.endsWith(" ");
  }

  /** The text that one more token completes. */
  take(token) {
    const piece = this.decode(token);
    if (!piece || !this.spaceGiven) return piece;
    this.spaceGiven = false;
    return piece.startsWith(" ") ? piece.slice(1) : piece;
  }
}
