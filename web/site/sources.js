// What a stream has been given and not yet read, in the encoder's chunks, as leap/runtime/streaming/sources.py cuts it.

import { LeapError } from "./errors.js";
import { checkSamples } from "./fbank.js";
import { endsSentence } from "./sentences.js";
import { EOS } from "./vocabulary.js";
import { endsWhite, splitWords } from "./words.js";

const LONGEST_WORD = 1000; // Characters; longer ones are refused, lest one takes minutes.
const SILENCE = 7; // Mean log energy of a frame that counts as sound.
const QUIET = 0; // Loudest band of a normalised frame below which it is quiet.
const PAUSE = 30; // Quiet frames in a row, of 10 ms each, that make a pause.
const SHORTEST = 10; // Louder frames that make a sentence; fewer are a click.

/** Text to read: sentences end where they end, and at the latest after `reset` subwords. */
export class TextSource {
  constructor(vocabulary, { chunkSize, reset, language }) {
    Object.assign(this, { vocabulary, chunkSize, reset, language });
    this.pieces = [];
    this.begun = "";
    this.nPieces = 0;
    this.last = "";
  }

  /** Take more text, in which white space completes a word. */
  push(more) {
    const text = this.begun + more;
    const words = splitWords(text);
    const tooLong = words.find((word) => Array.from(word).length > LONGEST_WORD);
    if (tooLong) {
      throw new LeapError(
        `a word of more than ${LONGEST_WORD} characters, ${tooLong.slice(0, 20)}...; give text whose words are ` +
          "separated by white space",
      );
    }
    const isCut = words.length && !endsWhite(text);
    this.begun = isCut ? words.pop() : "";
    for (const word of words) this.add(word);
  }

  /** Say that nothing follows. */
  finish() {
    if (this.begun) this.add(this.begun);
    this.begun = "";
    if (this.nPieces) this.end();
  }

  /** The next chunk, if all of it has come. */
  take() {
    const end = (this.chunkSize ? this.pieces.slice(0, this.chunkSize) : this.pieces).indexOf(EOS);
    const size = end >= 0 ? end + 1 : this.chunkSize;
    if (!size || size > this.pieces.length) return null;
    const content = this.pieces.splice(0, size);
    return { content, nStates: size, isLast: content.at(-1) === EOS, isHeard: true };
  }

  add(word) {
    if (this.last && endsSentence(this.last, word, this.language)) this.end();
    const pieces = this.vocabulary.encode(word);
    this.pieces.push(...pieces);
    this.nPieces += pieces.length;
    if (!this.nPieces) return;
    this.last = word;
    if (this.nPieces >= this.reset || endsSentence(word, null, this.language)) this.end();
  }

  end() {
    this.pieces.push(EOS);
    this.nPieces = 0;
    this.last = "";
  }
}

/** Sound to read: a sentence ends where a pause begins, and at the latest after `reset` states; null for never. */
export class SpeechSource {
  constructor(extractor, { framesPerState, chunkSize, reset }) {
    Object.assign(this, { extractor, framesPerState, chunkSize, reset });
    this.begin();
  }

  /** Take more samples, from -1 to 1, at the extractor's rate. */
  push(samples) {
    checkSamples(samples);
    this.frames.push(...this.framed(samples));
  }

  /** Say that nothing follows. */
  finish() {
    this.isEnded = true;
  }

  /** The next chunk, if all of it has come; less of it if a pause begins there; the end, if there is nothing else. */
  take(nRead) {
    let size = this.chunkSize * this.framesPerState;
    if (size && !nRead) this.passOverSilence(size);
    if (!size || this.frames.length < size) {
      if (!this.isEnded) return null;
      size = this.frames.length;
      if (!size && !nRead) {
        this.begin();
        return null;
      }
    }
    let isLast = false;
    if (this.reset !== null) {
      const pause = this.pause(size);
      if (pause?.mayGoOn) return null;
      isLast = pause !== null;
      size = pause?.start ?? size;
      this.nLoud += this.frames.slice(0, size).filter((frame) => !isQuiet(frame)).length;
    }
    const isHeard = this.isHeard(size) && (this.reset === null || this.nLoud >= SHORTEST);
    const content = this.frames.splice(0, size);
    const nStates = Math.ceil(size / this.framesPerState);
    isLast ||= this.reset !== null && nRead + nStates >= this.reset;
    if (isLast) this.nLoud = 0;
    if (this.isEnded && !this.frames.length) {
      isLast = true;
      this.begin();
    }
    return { content, nStates, isLast, isHeard };
  }

  /** Drop chunks of silence; with resets, all up to the first sound. */
  passOverSilence(size) {
    while (this.frames.length >= size && !this.isHeard(size)) this.frames.splice(0, size);
    if (this.reset === null) return;
    const first = this.frames.slice(0, size).findIndex((frame) => !isQuiet(frame));
    this.frames.splice(0, first < 0 ? size : first);
  }

  /** The first pause that begins in a chunk of this size, or may do so, after some sound. */
  pause(size) {
    let start = null;
    let isBegun = this.nLoud > 0;
    const known = Math.min(size + PAUSE, this.frames.length);
    for (let i = 0; i < known; i++) {
      if (i >= size && start === null) return null;
      if (!isQuiet(this.frames[i])) {
        start = null;
        isBegun = true;
      } else if (isBegun && start === null) start = i;
      if (start !== null && i + 1 - start >= PAUSE) return { start, mayGoOn: false };
    }
    // What the source ends with is as good as a pause; of what may still come, one cannot tell.
    return start === null ? null : { start, mayGoOn: !this.isEnded };
  }

  begin() {
    this.frames = [];
    this.framed = this.extractor.stream();
    this.isEnded = false;
    this.nLoud = 0;
  }

  /** Whether there is anything but silence in the first n frames; with resets, but pauses. */
  isHeard(n) {
    const frames = this.frames.slice(0, n);
    if (!n || (this.reset !== null && frames.every(isQuiet))) return false;
    return frames.some((frame) => this.extractor.energy(frame) > SILENCE);
  }
}

function isQuiet(frame) {
  return frame.every((x) => x < QUIET);
}
