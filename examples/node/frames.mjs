// Frames: length and CRC-32 of the body, big-endian, and the body.

import { createConnection } from "node:net";
import { crc32 } from "node:zlib";

export class Frames {
  constructor(address) {
    const [host, port] = [address.replace(/:\d+$/, ""), Number(address.split(":").at(-1))];
    this.socket = createConnection(address.startsWith("unix:") ? { path: address.slice(5) } : { host, port });
    this.chunks = this.socket[Symbol.asyncIterator]();
    this.rest = Buffer.alloc(0);
  }

  write(body) {
    const header = Buffer.alloc(8);
    header.writeUInt32BE(body.length, 0);
    header.writeUInt32BE(crc32(body), 4);
    this.socket.write(Buffer.concat([header, body]));
  }

  async take(size) {
    while (this.rest.length < size) {
      const { value, done } = await this.chunks.next();
      if (done) throw new Error("the driver has closed the connection");
      this.rest = Buffer.concat([this.rest, value]);
    }
    const taken = this.rest.subarray(0, size);
    this.rest = this.rest.subarray(size);
    return taken;
  }

  async read() {
    const header = Buffer.from(await this.take(8));
    const body = await this.take(header.readUInt32BE(0));
    if (crc32(body) !== header.readUInt32BE(4)) throw new Error("a frame is damaged");
    return body;
  }
}
