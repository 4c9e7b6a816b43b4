// The translation model, in a thread of its own. Messages are answered one after another, in their order.
//
//     load {name, files?}           -> loaded {task, model, precision, rate, language} or failed {message}
//     begin {id, policy}            a new source; answers to what follows carry its id, and what is left of others is dropped
//     words {words}                 -> wrote {id, words: [{word, lag}], stateBytes} ..., whole words of text
//     line                          -> the same, then ended {id, nWords, length, lagging}
//     sound {samples, arrived}      -> wrote ..., heard {id, seconds}; `arrived` is when the last sample came, in milliseconds
//     finish                        -> wrote ..., ended ...
//
// `lag` is in words of text that were read and have no counterpart yet, or in milliseconds of sound, as
// leap simul stream has it; `lagging` is LAAL.

import { LeapError, firstLine } from "./errors.js";
import { Folder } from "./folder.js";
import { Translator } from "./translator.js";

let translator = null;
let newest = 0; // The id of the source that was begun last.
let source = null;

const commands = {
  async load({ name, files }) {
    await translator?.release();
    translator = source = null;
    translator = await Translator.load(files ? Folder.opened(name, files) : Folder.served(name));
    const { task, model, precision, translation } = translator.manifest;
    const { source_language: language, sound } = translation;
    postMessage({ type: "loaded", task, model, precision, language, rate: sound?.sampling_rate ?? null });
  },

  async begin({ id, policy }) {
    source = null;
    source = { id, stream: translator.stream(policy), delays: [], length: 0, now: 0, begun: 0 };
  },

  async words({ words }) {
    for (const word of words) {
      if (source.id !== newest) return;
      source.length++;
      told(await source.stream.push(` ${word} `), () => source.length - source.delays.length + 1);
    }
  },

  async line() {
    told(await source.stream.finish(), () => source.length - source.delays.length + 1);
    end();
  },

  async sound({ samples, arrived }) {
    const milliseconds = (1000 * samples.length) / translator.extractor.rate;
    const before = performance.now();
    const words = await source.stream.push(samples);
    // Computing waits for the sound, or for the computing before it.
    source.now = Math.max(source.now, arrived) + performance.now() - before;
    source.begun = arrived - milliseconds;
    source.length += milliseconds;
    told(words, () => source.now - source.begun);
    postMessage({ type: "heard", id: source.id, seconds: source.length / 1000 });
  },

  async finish() {
    const before = performance.now();
    const words = await source.stream.finish();
    source.now += performance.now() - before;
    told(words, () => source.now - source.begun);
    end();
  },
};

/** Tell of words with their lags. */
function told(words, lag) {
  const found = words.map((word) => {
    source.delays.push(source.length);
    return { word, lag: lag() };
  });
  postMessage({ type: "wrote", id: source.id, words: found, stateBytes: source.stream.stateBytes });
}

/** Tell of the end of a line, or of all sound; another may begin. */
function end() {
  const { id, delays, length } = source;
  postMessage({ type: "ended", id, nWords: delays.length, length, lagging: lagging(delays, length) });
  source.delays = [];
  source.length = 0;
}

/** LAAL, the translation taken for as long as it should be; null without a word. */
function lagging(delays, length) {
  if (!delays.length) return null;
  const last = delays.findIndex((delay) => delay >= length);
  const counted = last < 0 ? delays : delays.slice(0, last + 1);
  return counted.reduce((sum, delay, i) => sum + delay - (i * length) / delays.length, 0) / counted.length;
}

let queue = Promise.resolve();

addEventListener("message", ({ data }) => {
  if (data.type === "begin") newest = data.id;
  queue = queue.then(async () => {
    const needsSource = !["load", "begin"].includes(data.type);
    if (needsSource && source?.id !== newest) return;
    try {
      await commands[data.type](data);
    } catch (error) {
      const message = error instanceof LeapError ? error.message : `the model could not go on (${firstLine(error)})`;
      postMessage({ type: "failed", message });
      source = null;
    }
  });
});
