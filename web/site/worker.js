// The model, in a thread of its own: the page stays quick while a text is written.
//
//     load {name, files?}                          -> loaded {model, precision, stateBytes} or failed {message}
//     write {prompt, tokens, temperature, seed}    -> wrote {piece, n, nRead, stateBytes} ..., then done {ended} or failed
//     more {tokens}                                -> the same, going on with the text
//     stop                                         -> done, as soon as the token at hand is written

import { LeapError, firstLine } from "./errors.js";
import { Folder } from "./folder.js";
import { emptyState, stateBytes } from "./graph.js";
import { Writer } from "./writer.js";

const REPORT_EVERY = 40; // Milliseconds, at the least.

let writer = null;
let text = null;
let stopped = false;
let nAsked = 0; // Models asked for so far: one that is chosen while another loads takes its place.

const commands = {
  async load({ name, files }) {
    const own = ++nAsked;
    const before = writer;
    writer = text = null;
    await before?.release();
    let found;
    try {
      found = await Writer.load(files ? Folder.opened(name, files) : Folder.served(name));
    } catch (error) {
      if (own === nAsked) throw error;
      return;
    }
    if (own !== nAsked) {
      await found.release();
      return;
    }
    writer = found;
    const { model, precision, states } = writer.manifest;
    postMessage({ type: "loaded", model, precision, stateBytes: stateBytes(emptyState(states)) });
  },

  async write({ prompt, tokens, temperature, seed }) {
    text = writer.begin(prompt, { temperature, seed });
    await writeOn(tokens);
  },

  async more({ tokens }) {
    await writeOn(tokens);
  },
};

async function writeOn(tokens) {
  text.checkLength(tokens);
  let [piece, n, ended] = ["", 0, false];
  let told = 0; // The first token is told of at once, and speed measured from there.
  const report = () => {
    postMessage({ type: "wrote", piece, n, nRead: text.nRead, stateBytes: text.stateBytes });
    [piece, n, told] = ["", 0, performance.now()];
  };
  for (let i = 0; i < tokens && !ended && !stopped; i++) {
    const next = await text.next();
    piece += next.piece;
    ended = next.ended;
    n++;
    if (performance.now() - told >= REPORT_EVERY) {
      report();
      await messagesRead();
    }
  }
  if (n) report();
  postMessage({ type: "done", ended });
}

/** Let messages in that have come meanwhile, and nothing else: a timer would wait longer. */
function messagesRead() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

addEventListener("message", async ({ data }) => {
  stopped = data.type === "stop";
  if (stopped) return;
  try {
    await commands[data.type](data);
  } catch (error) {
    const told = error instanceof LeapError ? error.message : `the model could not go on (${firstLine(error)})`;
    postMessage({ type: "failed", message: told });
  }
});
