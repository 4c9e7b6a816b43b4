// Where sentences end in text that is still arriving, as leap/runtime/streaming/sentences.py tells it.

import init, { segment } from "./vendor/sentencex.mjs";

const OPENING = /^["'“„«([{¿¡]+/; // What stands before a word, and hides an abbreviation from the splitter.
const FOLLOWING = ["They", "and"]; // A word that begins sentences, and one that does not.

let ready = null;

/** Load what tells ends of sentences. */
export function loadSentences() {
  ready ??= init({ module_or_path: new URL("vendor/sentencex.wasm", import.meta.url) });
  return ready;
}

/** Whether a sentence ends after a word: for sure, if the following word is null. */
export function endsSentence(word, following, language) {
  const bare = word.replace(OPENING, "");
  const isSplit = (next) => segment(language, `${bare} ${next}`).length > 1;
  return following === null ? FOLLOWING.every(isSplit) : isSplit(following);
}
