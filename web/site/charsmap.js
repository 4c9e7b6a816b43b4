// SentencePiece's normalisation: a trie of what is replaced, and by what, as the tokenizers library reads it.

const LONGEST = 6; // Bytes of a grapheme that is not looked up as a whole.
const graphemes = new Intl.Segmenter("en", { granularity: "grapheme" });
const encoder = new TextEncoder();
const decoder = new TextDecoder();

export class Charsmap {
  /** Read the map: the trie's size in bytes, the trie as numbers of 32 bits, and texts that end with a 0. */
  constructor(base64) {
    const bytes = Uint8Array.from(atob(base64), (x) => x.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const size = view.getUint32(0, true);
    this.trie = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.texts = bytes.subarray(4 + size);
  }

  /** A text as the subwords were found in it. */
  normalise(text) {
    let found = "";
    for (const { segment } of graphemes.segment(text)) {
      const whole = encoder.encode(segment).length < LONGEST ? this.replacement(segment) : null;
      found += whole ?? Array.from(segment, (each) => this.replacement(each) ?? each).join("");
    }
    return found;
  }

  /** What stands for some characters: that of their shortest beginning which has one, or null. */
  replacement(characters) {
    let at = offset(this.trie[0]);
    for (const byte of encoder.encode(characters)) {
      if (!byte) return null;
      at ^= byte;
      const unit = this.trie[at];
      if ((unit & 0x800000ff) >>> 0 !== byte) return null;
      at ^= offset(unit);
      if ((unit >>> 8) & 1) {
        const start = this.trie[at] & 0x7fffffff;
        return decoder.decode(this.texts.subarray(start, this.texts.indexOf(0, start)));
      }
    }
    return null;
  }
}

function offset(unit) {
  return (unit >>> 10) << ((unit & 512) >>> 6);
}
