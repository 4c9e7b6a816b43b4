// The random numbers of numpy.random.default_rng(seed): a seed writes here what it writes in Python.
//
// Seeds are spread over 128 bits by O'Neill's seed_seq_fe; the numbers are PCG64's (XSL RR 128/64).

const LOW_64 = (1n << 64n) - 1n;
const LOW_128 = (1n << 128n) - 1n;
const FACTOR = 0x2360ed051fc65da44385df649fccf645n;

/** Numbers from 0 to 1, drawn evenly. */
export class Random {
  constructor(seed) {
    const [a, b, c, d] = spread(seed);
    this.increment = ((((c << 64n) | d) << 1n) | 1n) & LOW_128;
    this.state = 0n;
    this.step();
    this.state = (this.state + ((a << 64n) | b)) & LOW_128;
    this.step();
  }

  /** The next number. */
  next() {
    this.step();
    const folded = (this.state >> 64n) ^ (this.state & LOW_64);
    const turn = this.state >> 122n;
    const bits = ((folded >> turn) | (folded << (64n - turn))) & LOW_64;
    return Number(bits >> 11n) / 2 ** 53;
  }

  step() {
    this.state = (this.state * FACTOR + this.increment) & LOW_128;
  }
}

/** Four numbers of 64 bits from a seed of 32, as numpy's SeedSequence makes them. */
function spread(seed) {
  const hash = hasher(0x43b0d7e5, 0x931e8875);
  const pool = [seed, 0, 0, 0].map(hash);
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  const draw = hasher(0x8b51f9dd, 0x58f38ded);
  const found = Array.from({ length: 8 }, (_, i) => BigInt(draw(pool[i % 4])));
  return [0, 2, 4, 6].map((i) => found[i] | (found[i + 1] << 32n));
}

function hasher(constant, factor) {
  return (value) => {
    const mixed = value ^ constant;
    constant = Math.imul(constant, factor);
    return folded(Math.imul(mixed, constant));
  };
}

function mix(x, y) {
  return folded(Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y));
}

function folded(value) {
  return (value ^ (value >>> 16)) >>> 0;
}
