// Writing with an exported language model, each token at the same cost, as leap/runtime/writer.py does.

import { LeapError } from "./errors.js";
import { Graph, emptyState, integers, stateBytes } from "./graph.js";
import { readManifest } from "./manifest.js";
import { Random } from "./random.js";
import { Continuation, readCodec } from "./text.js";

/** An exported language model. */
export class Writer {
  /** Load a folder of leap export. */
  static async load(folder) {
    const manifest = await readManifest(folder, "lm");
    const codec = await readCodec(folder, manifest.tokenizer);
    return new Writer(manifest, codec, await Graph.load(folder, manifest, "step"));
  }

  constructor(manifest, codec, graph) {
    this.manifest = manifest;
    this.codec = codec;
    this.graph = graph;
  }

  /** A text that begins with a prompt and is to be written on. */
  begin(prompt, { temperature, seed }) {
    return new Text(this, prompt, temperature, new Random(seed));
  }

  /** Read some tokens, any number: the logits after the last, and the state. */
  async logits(tokens, states) {
    const { at_once: atOnce } = this.manifest;
    for (let start = 0; ; start += atOnce) {
      const part = tokens.slice(start, start + atOnce);
      const last = start + atOnce >= tokens.length;
      const at = last ? [part.length - 1] : [];
      const inputs = { tokens: integers(part, [1, part.length]), at: integers(at, [at.length]) };
      const [found, after] = await this.graph.run(states, inputs);
      states = after;
      if (last) return [found.logits.data, states];
    }
  }

  /** Free the memory of the model. */
  release() {
    return this.graph.release();
  }
}

class Text {
  constructor(writer, prompt, temperature, random) {
    this.writer = writer;
    this.temperature = temperature;
    this.random = random;
    this.states = emptyState(writer.manifest.states);
    // An end of text, after which a new one begins, is read first.
    this.unread = [writer.codec.end, ...writer.codec.tokens(prompt)];
    this.continuation = new Continuation(writer.codec, prompt, this.unread);
    this.nRead = 0;
  }

  /** Memory that the state takes. */
  get stateBytes() {
    return stateBytes(this.states);
  }

  /** Refuse to write more than the model has positions for. */
  checkLength(n) {
    const before = this.nRead + this.unread.length;
    const limit = this.writer.manifest.n_positions;
    if (limit !== null && before + n - 1 > limit) {
      throw new LeapError(
        `${before} tokens read and ${n} to write are more than the ${limit} positions this model has learned; use a ` +
          "shorter prompt, or fewer tokens, or a model with position_embedding alibi or none, which know no limit",
      );
    }
  }

  /** Write one token: the text that it completes, and whether the text ends with it. */
  async next() {
    const { codec } = this.writer;
    const [logits, states] = await this.writer.logits(this.unread, this.states);
    this.states = states;
    this.nRead += this.unread.length;
    const token = choose(logits, this.temperature, this.random);
    this.unread = [token];
    return { piece: this.continuation.take(token), ended: codec.spellsLineEnds && token === codec.end };
  }
}

/** A token by the logits of all: the likeliest at temperature 0, else one drawn. */
export function choose(logits, temperature, random) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (!temperature) return best;
  const p = Float64Array.from(logits, (x) => Math.exp(x / temperature - logits[best] / temperature));
  const total = p.reduce((a, b) => a + b, 0);
  const wanted = random.next() * total;
  // By the inverse of the distribution function: one random number per token.
  for (let i = 0, sum = 0; i < p.length; i++) {
    sum += p[i];
    if (sum > wanted) return i;
  }
  return best; // Rounding left nothing to choose.
}
