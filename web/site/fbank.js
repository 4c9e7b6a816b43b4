// Sound to frames: the logarithm of the energy in each mel band, every 10 ms, as leap/runtime/fbank.py has it.

import { LeapError } from "./errors.js";

const FULL_SCALE = 32768; // Kaldi's largest sample; ours is 1.
const LOUDEST = 32; // A sample that cannot be meant to lie between -1 and 1.
const [LOWEST, PREEMPHASIS, FLOOR] = [20, 0.97, 2 ** -23];

/** Makes frames of sound, each a Float32Array with a number for every band. */
export class FilterBank {
  constructor({ feature_size: nBands, sampling_rate: rate, lead, mean, std }) {
    [this.nBands, this.rate, this.lead] = [nBands, rate, lead];
    this.mean = mean && Float32Array.from(mean);
    this.std = std && Float32Array.from(std);
    this.window = Math.floor((rate * 25) / 1000);
    this.step = Math.floor((rate * 10) / 1000);
    this.size = 1 << Math.ceil(Math.log2(this.window)); // Points of the Fourier transform.
    this.shape = Float64Array.from({ length: this.window }, (_, i) =>
      (0.5 - 0.5 * Math.cos((2 * Math.PI * i) / (this.window - 1))) ** 0.85,
    );
    this.bands = makeBands(rate, nBands, this.size);
    this.transform = new Fourier(this.size);
  }

  /** Frames of samples, not normalised. */
  rawFrames(samples) {
    const n = Math.max(0, Math.floor((samples.length - this.window) / this.step) + 1);
    return Array.from({ length: n }, (_, i) => this.rawFrame(samples.subarray(i * this.step, i * this.step + this.window)));
  }

  rawFrame(samples) {
    const x = Float64Array.from(samples, (value) => value * FULL_SCALE);
    const mean = x.reduce((a, b) => a + b, 0) / x.length;
    const { real, imaginary } = this.transform;
    real.fill(0);
    imaginary.fill(0);
    for (let i = 0; i < x.length; i++) {
      real[i] = (x[i] - mean - PREEMPHASIS * (x[Math.max(0, i - 1)] - mean)) * this.shape[i];
    }
    this.transform.run();
    return Float32Array.from(this.bands, ({ start, weights }) => {
      let energy = 0;
      weights.forEach((weight, i) => (energy += weight * (real[start + i] ** 2 + imaginary[start + i] ** 2)));
      return Math.log(Math.max(energy, FLOOR));
    });
  }

  /** A frame with the training data's mean and deviation taken out, if these are known. */
  normalise(frame) {
    return frame.map((x, i) => {
      const centred = this.mean ? Math.fround(x - this.mean[i]) : x;
      return this.std ? centred / this.std[i] : centred;
    });
  }

  /** Mean log energy of a normalised frame; that of no sound at all is about -16. */
  energy(frame) {
    const raw = frame.map((x, i) => x * (this.std?.[i] ?? 1) + (this.mean?.[i] ?? 0));
    return raw.reduce((a, b) => a + b, 0) / raw.length;
  }

  /** What makes the same frames, normalised, of sound that is still arriving. */
  stream() {
    let rest = new Float32Array(this.lead);
    return (samples) => {
      const sound = new Float32Array(rest.length + samples.length);
      sound.set(rest);
      sound.set(samples, rest.length);
      const frames = this.rawFrames(sound);
      rest = sound.slice(frames.length * this.step);
      return frames.map((frame) => this.normalise(frame));
    };
  }
}

/** Refuse samples that are no sound. */
export function checkSamples(samples) {
  if (!samples.every(Number.isFinite)) throw new LeapError("the recording holds samples that are no finite numbers");
  const loudest = samples.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
  if (loudest > LOUDEST) throw new LeapError(`the recording holds a sample of ${loudest}; give numbers from -1 to 1`);
}

/** Of each band, the frequencies that it takes: the first, and how much of it and those after. */
function makeBands(rate, nBands, size) {
  const mel = (frequency) => 1127 * Math.log(1 + frequency / 700);
  const [low, high] = [mel(LOWEST), mel(rate / 2)];
  const edges = Array.from({ length: nBands + 2 }, (_, i) => low + ((high - low) * i) / (nBands + 1));
  const at = Array.from({ length: size / 2 }, (_, i) => mel((i * rate) / size));
  return Array.from({ length: nBands }, (_, band) => {
    const [left, centre, right] = edges.slice(band, band + 3);
    const all = at.map((x) => Math.max(Math.min((x - left) / (centre - left), (right - x) / (right - centre)), 0));
    const start = Math.max(0, all.findIndex((weight) => weight > 0));
    const end = all.findLastIndex((weight) => weight > 0) + 1;
    return { start, weights: all.slice(start, end) };
  });
}

/** The fast Fourier transform, in place, of a power of two of complex numbers. */
class Fourier {
  constructor(size) {
    this.real = new Float64Array(size);
    this.imaginary = new Float64Array(size);
    this.cos = Float64Array.from({ length: size / 2 }, (_, i) => Math.cos((2 * Math.PI * i) / size));
    this.sin = Float64Array.from({ length: size / 2 }, (_, i) => -Math.sin((2 * Math.PI * i) / size));
    const bits = Math.log2(size);
    this.places = Uint32Array.from({ length: size }, (_, i) => {
      let turned = 0;
      for (let bit = 0; bit < bits; bit++) turned |= ((i >> bit) & 1) << (bits - 1 - bit);
      return turned;
    });
  }

  run() {
    const { real, imaginary, cos, sin, places } = this;
    const size = real.length;
    for (let i = 0; i < size; i++) {
      const j = places[i];
      if (j <= i) continue;
      [real[i], real[j]] = [real[j], real[i]];
      [imaginary[i], imaginary[j]] = [imaginary[j], imaginary[i]];
    }
    for (let half = 1; half < size; half *= 2) {
      const stride = size / (2 * half);
      for (let begin = 0; begin < size; begin += 2 * half) {
        for (let i = 0; i < half; i++) {
          const [c, s] = [cos[i * stride], sin[i * stride]];
          const [a, b] = [begin + i, begin + i + half];
          const x = real[b] * c - imaginary[b] * s;
          const y = real[b] * s + imaginary[b] * c;
          real[b] = real[a] - x;
          imaginary[b] = imaginary[a] - y;
          real[a] += x;
          imaginary[a] += y;
        }
      }
    }
  }
}
