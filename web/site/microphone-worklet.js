// Hands on what is heard, one channel, some samples at a time, in the thread that hears it.

const SIZE = 1024;

registerProcessor(
  "microphone",
  class extends AudioWorkletProcessor {
    held = new Float32Array(SIZE);
    n = 0;

    process([channels]) {
      for (let i = 0; i < (channels[0]?.length ?? 0); i++) {
        this.held[this.n++] = channels.reduce((sum, each) => sum + each[i], 0) / channels.length;
        if (this.n < SIZE) continue;
        this.port.postMessage(this.held, [this.held.buffer]);
        this.held = new Float32Array(SIZE);
        this.n = 0;
      }
      return true;
    }
  },
);
