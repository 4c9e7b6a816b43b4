// Where the files of an exported model come from: the server of the page, or the reader's own disk.

import { LeapError, firstLine } from "./errors.js";

/** An exported folder: its name, and a function from a file's name to its bytes, null if it has none. */
export class Folder {
  constructor(name, read) {
    this.name = name;
    this.read = read;
  }

  /** A folder beside the page, under models/. */
  static served(name) {
    return new Folder(name, async (file) => {
      const url = new URL(`models/${encodeURIComponent(name)}/${file}`, import.meta.url);
      try {
        const response = await fetch(url);
        if (response.status === 404) return null;
        if (!response.ok) throw new Error(`status ${response.status}`);
        return await response.arrayBuffer();
      } catch (error) {
        throw new LeapError(`${name}/${file} could not be fetched (${firstLine(error)}); is the file server running?`);
      }
    });
  }

  /** A folder that was chosen on this machine: its files, by name. */
  static opened(name, files) {
    return new Folder(name, async (file) => {
      try {
        return files.has(file) ? await files.get(file).arrayBuffer() : null;
      } catch (error) {
        throw new LeapError(`${name}/${file} could not be read (${firstLine(error)}); open the folder again`);
      }
    });
  }
}
