// What a word is: what Python takes for white space ends it.

const WHITE = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/;

/** The words of a text. */
export function splitWords(text) {
  return text.split(WHITE).filter(Boolean);
}

/** Whether a text ends with white space. */
export function endsWhite(text) {
  return WHITE.test(text.slice(-1));
}
