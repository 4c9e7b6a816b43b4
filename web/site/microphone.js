// What is spoken, or a sound file, as samples of one channel at the rate that a model takes.

import { LeapError, firstLine } from "./errors.js";
import { resampler } from "./resample.js";

const REASONS = {
  NotAllowedError: "the microphone was refused; allow it for this page, or give a sound file",
  NotFoundError: "no microphone was found; plug one in, or give a sound file",
  NotReadableError: "the microphone could not be opened; close what else uses it, or give a sound file",
};

/**
 * Listen until it is stopped.
 *
 * @param rate of the samples
 * @param milliseconds that are heard at once
 * @param heard is given the samples, as they come
 * @returns a function that stops, and gives the samples that are left
 */
export async function listen(rate, milliseconds, heard) {
  if (!navigator.mediaDevices?.getUserMedia || typeof AudioWorkletNode !== "function") {
    throw new LeapError(
      "this browser gives the page no microphone; open it by https or from localhost in a current one, or give a sound file",
    );
  }
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  } catch (error) {
    throw new LeapError(REASONS[error.name] ?? `there is no microphone (${firstLine(error)}); give a sound file`);
  }
  const context = new AudioContext();
  const stop = () => {
    for (const track of stream.getTracks()) track.stop();
    context.close();
  };
  try {
    await context.audioWorklet.addModule(new URL("microphone-worklet.js", import.meta.url));
  } catch (error) {
    stop();
    throw new LeapError(`the microphone could not be heard (${firstLine(error)}); load the page again`);
  }
  const resample = resampler(context.sampleRate, rate);
  const size = Math.ceil((milliseconds * rate) / 1000);
  let held = new Float32Array(0);
  const node = new AudioWorkletNode(context, "microphone");
  node.port.onmessage = ({ data }) => {
    held = joined(held, resample(data));
    while (held.length >= size) {
      heard(held.slice(0, size));
      held = held.slice(size);
    }
  };
  context.createMediaStreamSource(stream).connect(node);
  node.connect(context.destination); // It gives silence; what is not connected may not be run.
  return () => {
    node.port.onmessage = null;
    stop();
    return held;
  };
}

/** The sound of a file: to be played, and its samples. */
export async function decode(file, rate) {
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await file.arrayBuffer());
  } catch (error) {
    throw new LeapError(
      `${file.name} is no sound file that this browser can read (${firstLine(error)}); give a WAV, FLAC, MP3 or Ogg file`,
    );
  }
  const channels = Array.from({ length: sound.numberOfChannels }, (_, i) => sound.getChannelData(i));
  if (channels.length === 1) return { sound, samples: channels[0] };
  return { sound, samples: channels[0].map((_, i) => channels.reduce((sum, each) => sum + each[i], 0) / channels.length) };
}

/** Play a sound aloud: a function that stops it. */
export function play(sound) {
  const context = new AudioContext();
  const node = new AudioBufferSourceNode(context, { buffer: sound });
  node.connect(context.destination);
  node.start();
  return () => context.close();
}

function joined(a, b) {
  const both = new Float32Array(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}
