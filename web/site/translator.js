// Translating with an exported model while the source is still arriving, as leap/runtime/translator.py does.

import { LeapError } from "./errors.js";
import { FilterBank } from "./fbank.js";
import { Graph, emptyState, integers, numbers, stateBytes } from "./graph.js";
import { AGAIN, readManifest } from "./manifest.js";
import { readPolicy } from "./policies.js";
import { loadSentences } from "./sentences.js";
import { SpeechSource, TextSource } from "./sources.js";
import { BOS, EOS, PAD, SPACE, UNK, readSubwords } from "./vocabulary.js";

const FEW = 10; // Subwords that may be written whatever the source's length.
const LONGEST = 2; // Subwords to write for each source state, besides a few.
const LONGEST_WORD = 64; // Subwords after which a word is taken for complete.
const DRAFT = 32; // Longest draft of what may follow, in subwords.
const RESET = 200; // States after which a sentence is taken for ended.
const BEFORE = "before.read"; // The state that a chunk changes once, in however many parts it is read.

/** An exported translation model. */
export class Translator {
  /** Load a folder of leap export. */
  static async load(folder) {
    const manifest = await readManifest(folder, "text", "speech");
    const vocabulary = await readSubwords(folder, manifest.tokenizer, manifest.vocabulary);
    if (manifest.task === "text") await loadSentences();
    const read = await Graph.load(folder, manifest, "read");
    return new Translator(folder, manifest, vocabulary, read, await Graph.load(folder, manifest, "write"));
  }

  constructor(folder, manifest, vocabulary, read, write) {
    Object.assign(this, { manifest, vocabulary, read, write });
    this.told = manifest.translation;
    const isSpeech = manifest.task === "speech";
    const { sound, frames_per_state: framesPerState, chunk_sizes: sizes, ratio } = this.told;
    const whole = (x) => Number.isInteger(x) && x > 0;
    if (!Array.isArray(sizes) || !sizes.length || !whole(ratio) || (isSpeech && !(whole(sound?.sampling_rate) && whole(framesPerState)))) {
      throw new LeapError(`${folder.name} does not tell how its model reads; ${AGAIN}`);
    }
    this.extractor = isSpeech ? new FilterBank(sound) : null;
    this.framesPerState = framesPerState ?? 1;
  }

  /** A new stream under a policy, by its name. */
  stream(policyName) {
    const policy = readPolicy(policyName, this.told.ratio);
    const sizes = this.told.chunk_sizes.map((size) => size || Infinity);
    const chosen = policy.isOffline ? Math.max(...sizes) : Math.min(...sizes);
    const chunkSize = chosen === Infinity ? 0 : chosen;
    const { cross_window: window, source_language: language = "en" } = this.told;
    if (window && policy.tooNew && window <= chunkSize * policy.tooNew) {
      throw new LeapError(
        `${policy.name} trusts nothing of the last ${chunkSize * policy.tooNew} source states, and the model sees no ` +
          `more than ${window}; it would write nothing before the end`,
      );
    }
    const settings = { chunkSize, language, framesPerState: this.framesPerState };
    const source = this.extractor
      ? new SpeechSource(this.extractor, { ...settings, reset: policy.isOffline ? null : RESET })
      : new TextSource(this.vocabulary, { ...settings, reset: RESET });
    return new Stream(this, policy, source);
  }

  /** Read one more chunk: subwords, or frames. */
  async readChunk(content, states) {
    let [rows, width] = [content.map((each) => [each]), 1];
    if (this.extractor) {
      width = this.framesPerState * this.extractor.nBands;
      rows = [];
      for (let i = 0; i < content.length; i += this.framesPerState) {
        const row = new Float32Array(width); // What is missing of the last state is 0.
        content.slice(i, i + this.framesPerState).forEach((frame, j) => row.set(frame, j * this.extractor.nBands));
        rows.push(row);
      }
    }
    const size = this.told.reads_in_parts ? this.manifest.at_once : rows.length;
    let after = states;
    for (let start = 0; start < rows.length; start += size) {
      const part = rows.slice(start, start + size);
      const flat = part.flatMap((row) => Array.from(row));
      const source = this.extractor ? numbers(flat, [1, part.length, width]) : integers(flat, [1, part.length]);
      const before = after[BEFORE];
      [, after] = await this.read.run(after, { source });
      if (start && before) after = { ...after, [BEFORE]: before };
    }
    return after;
  }

  /** Write subwords: logits of what follows the last, states, and attention to what had been read before. */
  async logits(tokens, states) {
    const inputs = { tokens: integers(tokens, [1, tokens.length]), at: integers([tokens.length - 1], [1]) };
    const [found, after] = await this.write.run(states, inputs);
    return [found.logits.data, after, found.shares.data];
  }

  /** Free the memory of the model. */
  async release() {
    await this.read.release();
    await this.write.release();
  }
}

/** One source that is still arriving. */
class Stream {
  constructor(translator, policy, source) {
    Object.assign(this, { translator, policy, source });
    this.words = translator.vocabulary.words();
    this.new = [];
    this.begin();
  }

  /** Memory that the states take. */
  get stateBytes() {
    return stateBytes(this.states);
  }

  /** Take more of the source: the words that can be said by now. */
  push(more) {
    this.source.push(more);
    return this.run();
  }

  /** Say that the source has ended: all words that are left. The stream is then as new. */
  finish() {
    this.source.finish();
    return this.run();
  }

  /** Read and write in turn until there is nothing left to read. */
  async run() {
    for (let chunk; (chunk = this.source.take(this.nRead)); ) {
      this.nRead += chunk.nStates;
      this.isHeard ||= chunk.isHeard;
      this.isEnded = chunk.isLast;
      if (chunk.content.length) this.states = await this.translator.readChunk(chunk.content, this.states);
      if (this.policy.drafts && !this.isEnded) await this.agree();
      else await this.writeOn();
      if (this.isEnded) {
        this.new.push(...this.words.finish());
        this.begin();
      }
    }
    const words = this.new;
    this.new = [];
    return words;
  }

  /** Begin a sentence. */
  begin() {
    this.states = emptyState(this.translator.manifest.states);
    this.last = this.translator.told.start ?? BOS;
    this.nRead = this.nWritten = 0;
    this.isHeard = this.isSaid = this.isEnded = false;
    this.drafts = [];
  }

  get limit() {
    return Math.floor(LONGEST * this.nRead) + FEW;
  }

  get mayWrite() {
    if (!this.isHeard || this.nWritten >= this.limit) return false;
    return this.isEnded || this.policy.mayWrite(this.nRead, this.nWritten);
  }

  /** Write until the sentence has ended or more has to be read. */
  async writeOn() {
    while (this.mayWrite) {
      const { piece, after, shares } = await this.next(this.last, this.states);
      const { window } = this.policy;
      // An end before the source's means that there is nothing to say yet.
      if (piece === EOS) return;
      if (!this.isEnded && window && !this.policy.trusts(newest(shares, window))) return;
      this.put(piece);
      this.states = after;
    }
  }

  /** The likeliest subword that may follow another. */
  async next(last, states) {
    const [logits, after, shares] = await this.translator.logits([last], states);
    const { space } = this.translator.vocabulary;
    const mustSay = this.isEnded && !this.isSaid; // A source that holds something has a translation.
    let piece = -1;
    for (let i = 0; i < logits.length; i++) {
      if (i === BOS || i === PAD || i === UNK) continue;
      if (mustSay && (i === EOS || (i === space && last === space))) continue;
      if (piece < 0 || logits[i] > logits[piece]) piece = i;
    }
    return { piece, after, shares };
  }

  put(piece) {
    this.last = piece;
    this.nWritten++;
    this.isSaid ||= this.translator.vocabulary.pieces[piece] !== SPACE;
    this.new.push(...this.words.push(piece));
    if (this.words.nHeld() >= LONGEST_WORD) this.new.push(...this.words.finish());
  }

  /** Write what the last drafts begin with in common. */
  async agree() {
    if (!this.mayWrite) return;
    const { drafts } = this.policy;
    this.drafts = [...this.drafts, await this.draft()].slice(-drafts);
    const agreed = common(this.drafts).slice(0, this.nRead - this.nWritten);
    if (this.drafts.length < drafts || !agreed.length) return;
    [, this.states] = await this.translator.logits([this.last, ...agreed.slice(0, -1)], this.states);
    this.drafts = this.drafts.map((draft) => draft.slice(agreed.length));
    for (const piece of agreed) this.put(piece);
  }

  /** What would follow if nothing more were read. */
  async draft() {
    const draft = [];
    let states = this.states;
    while (draft.length < DRAFT) {
      const { piece, after } = await this.next(draft.at(-1) ?? this.last, states);
      if (piece === EOS || this.nWritten + draft.length >= this.limit) break;
      draft.push(piece);
      states = after;
    }
    return draft;
  }
}

/** Attention to each of the last chunks, the newest first, by that to what had been read before each. */
function newest(shares, window) {
  return Array.from({ length: window }, (_, i) => (i ? shares[i - 1] : 1) - shares[i]);
}

/** What all begin with. */
function common([first, ...others]) {
  const end = first.findIndex((piece, i) => others.some((draft) => draft[i] !== piece));
  return end < 0 ? first : first.slice(0, end);
}
