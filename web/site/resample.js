// Sound at another rate, as it arrives: each sample is a sum of those around it, weighed by a windowed sinc.

const CROSSINGS = 24; // Zeros of the sinc on either side.
const BETA = 9; // Of Kaiser's window: what is above the band is 90 dB down.
const ROLL_OFF = 0.95; // The share of the band that is kept.

/** A function that takes samples at one rate, any number, and gives those they complete at the other. */
export function resampler(from, to) {
  if (from === to) return (samples) => samples;
  const cut = (ROLL_OFF * Math.min(from, to)) / from; // As a share of the band that comes in.
  const reach = Math.ceil(CROSSINGS / cut);
  const step = divisor(from, to);
  // Samples fall into so many places between two that come in; the weights of each are the same again and again.
  const weights = Array.from({ length: to / step }, (_, place) =>
    Float64Array.from({ length: 2 * reach }, (_, i) => weight((place * step) / to + reach - 1 - i, cut, reach)),
  );
  let held = new Float32Array(reach); // Silence before the first sample.
  let first = -reach; // Where the first held sample stands in all the sound.
  let n = 0; // Samples given so far.
  return (samples) => {
    const sound = new Float32Array(held.length + samples.length);
    sound.set(held);
    sound.set(samples, held.length);
    const found = [];
    for (; ; n++) {
      const start = Math.floor((n * from) / to) - first - reach + 1;
      if (start + 2 * reach > sound.length) break;
      const around = weights[((n * from) % to) / step];
      let sum = 0;
      for (let i = 0; i < around.length; i++) sum += around[i] * sound[start + i];
      found.push(sum);
    }
    const keep = Math.max(0, Math.floor((n * from) / to) - first - reach);
    held = sound.slice(keep);
    first += keep;
    return Float32Array.from(found);
  };
}

function divisor(a, b) {
  return b ? divisor(b, a % b) : a;
}

function weight(x, cut, reach) {
  const inside = 1 - (x / reach) ** 2;
  if (inside <= 0) return 0;
  const sinc = x ? Math.sin(Math.PI * cut * x) / (Math.PI * x) : cut;
  return (sinc * bessel(BETA * Math.sqrt(inside))) / bessel(BETA);
}

/** The modified Bessel function of the first kind, of order 0. */
function bessel(x) {
  let [sum, term] = [1, 1];
  for (let k = 1; term > 1e-12 * sum; k++) sum += term *= (x / (2 * k)) ** 2;
  return sum;
}
