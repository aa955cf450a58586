// An external trainer in another language, with no framework at all: Node.js, its standard library, and gradients by hand.
//
// jobs/configs/bridge.toml is a job that it takes part in; docs/bridge.md has the protocol.

import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { Frames } from "./frames.mjs";
import { ENVELOPE, MESSAGES, decode, encode } from "./messages.mjs";
import { Model } from "./model.mjs";
import { loadTensors, saveTensors } from "./tensors.mjs";

const tick = () => new Promise(setImmediate); // Lets messages in, and signs of life out.

class Trainer {
  constructor(environment) {
    this.folder = environment.HYPHA_BRIDGE_WORK_DIR;
    this.token = readFileSync(environment.HYPHA_BRIDGE_TOKEN_FILE, "utf8").trim();
    this.frames = new Frames(environment.HYPHA_BRIDGE_SOCKET);
    this.sent = this.heard = 0;
    this.session = Buffer.alloc(0);
    this.waiting = [];
  }

  say(name, message = {}) {
    const { session } = this;
    this.frames.write(encode(ENVELOPE, { version: 1, sequence: ++this.sent, session, [name]: message }));
  }

  async hear() {
    const envelope = decode(ENVELOPE, await this.frames.read());
    const name = Object.keys(MESSAGES).find((one) => envelope[one] !== undefined);
    if (envelope.sequence !== ++this.heard) throw new Error("a message was repeated or left out");
    if (name === "error") throw new Error(`${envelope.error.code}: ${envelope.error.text}`);
    return [name, envelope[name]];
  }

  prove(side, challenge, nonce) {
    const said = Buffer.concat([Buffer.from(`hypha-bridge 1 ${side}`), challenge.session, challenge.nonce, nonce]);
    return createHmac("sha256", this.token).update(said).digest();
  }

  async greet() {
    const nonce = randomBytes(32);
    this.say("hello", { name: "node-trainer", nonce, shares_files: 1 });
    const [, challenge] = await this.hear();
    this.session = Buffer.from(challenge.session);
    this.say("authenticate", { proof: this.prove("trainer", challenge, nonce) });
    const [, welcome] = await this.hear();
    if (!timingSafeEqual(welcome.proof, this.prove("driver", challenge, nonce))) throw new Error("another token");
    this.life = setInterval(() => this.say("alive"), (welcome.silence_s * 1000) / 5);
    const [, job] = await this.hear();
    this.job = JSON.parse(readFileSync(join(this.folder, job.path), "utf8"));
  }

  // Keeps the newest that the driver has said of each kind.
  async listen() {
    for (;;) {
      const [name, message] = await this.hear();
      this[name] = message;
      this.waiting.splice(0).forEach((wake) => wake());
      if (name === "done") return;
    }
  }

  over(round) {
    return this.done || this.leave || (this.parameters && this.parameters.round > round);
  }

  async until(condition) {
    while (!condition()) await new Promise((wake) => this.waiting.push(wake));
  }

  async train() {
    await this.greet();
    const listening = this.listen();
    const { config } = this.job.model;
    this.model = new Model(config);
    this.say("ready", { device: "cpu", parameters: this.model.parameters() });
    const rounds = (async () => {
      for (let round = -1; ; ) {
        await this.until(() => this.over(round));
        if (this.done || this.leave) break;
        round = this.parameters.round;
        await this.round(round);
      }
      if (this.leave) this.say("left");
    })();
    await Promise.race([rounds, listening.then(() => rounds)]);
    clearInterval(this.life);
    this.frames.socket.end();
  }

  async round(round) {
    this.model.load(loadTensors(join(this.folder, this.parameters.update.model_path)));
    this.say("merged", { round });
    const assigned = () => this.assignment?.round === round;
    await this.until(() => this.over(round) || assigned());
    if (!assigned()) return;
    if (this.assignment.evaluate.length) await this.evaluate(round);
    const totals = { samples: 0, batches: 0, loss: 0 };
    const sums = this.assignment.gradient ? this.model.zeros() : null;
    let report = { samples: 0, batches: 0, loss: 0, at: Date.now() };
    const flush = () => {
      const seconds = (Date.now() - report.at) / 1000;
      const values = { loss: report.loss / report.samples, batches: report.batches, tokens: report.samples, seconds };
      const items = Object.entries(values).map(([key, value]) => ({ key, value }));
      this.say("metrics", { items, data_processed: report.samples, local_round: round });
      report = { samples: 0, batches: 0, loss: 0, at: Date.now() };
    };
    while (!this.over(round) && assigned()) {
      const { train, batch_size, learning_rate, last_learning_rate } = this.assignment;
      const wanted = train.reduce((sum, one) => sum + one.samples, 0);
      if (totals.samples >= wanted) {
        if (wanted) break;
        const idle = this.assignment;
        await this.until(() => this.over(round) || this.assignment !== idle);
        continue;
      }
      const size = Math.min(batch_size, wanted - totals.samples);
      const { images, labels } = this.batch(train, totals.samples, size);
      const { loss, g } = this.model.gradient(images, labels);
      const rate = learning_rate + (totals.samples / wanted) * (last_learning_rate - learning_rate);
      if (sums) this.model.add(sums, g, size);
      else this.model.step(g, rate, this.job.inner_optimizer);
      for (const one of [totals, report]) (one.samples += size), (one.batches += 1), (one.loss += loss * size);
      if (totals.batches === 1 || Date.now() - report.at >= 1000 * this.job.report_every_s) flush();
      await tick();
    }
    if (!totals.samples || (this.parameters.round > round)) return;
    if (report.samples) flush();
    const model_path = `updates/round_${String(round).padStart(6, "0")}.safetensors`;
    const tensors = sums ? this.model.means(sums, totals.samples) : this.model.tensors;
    const content = saveTensors(join(this.folder, model_path), tensors);
    const { samples, batches } = totals;
    this.say("update", { round, update: { model_path }, content, samples, tokens: samples, batches, loss: totals.loss / samples });
  }

  async evaluate(round) {
    const [sums, slices] = [{ round, loss_sum: 0, count: 0, correct: 0 }, this.assignment.evaluate];
    const { images, labels } = this.batch(slices, 0, slices.reduce((sum, one) => sum + one.samples, 0));
    for (let n = 0; n < labels.length; n++) {
      const { loss, hit } = this.model.sample(images.subarray(n * this.model.inputs, (n + 1) * this.model.inputs), labels[n]);
      (sums.loss_sum += loss), (sums.count += 1), (sums.correct += hit);
      if (n % 100 === 99) await tick();
    }
    this.say("evaluation", sums);
  }

  // So many samples of the slices, from the one of that number on.
  batch(slices, start, size) {
    const images = new Float32Array(size * this.model.inputs);
    const labels = [];
    let before = 0;
    for (const { path, samples } of slices) {
      const [first, last] = [Math.max(start - before, 0), Math.min(start + size - before, samples)];
      if (first < last) {
        const tensors = (this.slices ??= new Map()).get(path) ?? loadTensors(join(this.folder, path));
        this.slices.set(path, tensors);
        if (this.slices.size > 64) this.slices.delete(this.slices.keys().next().value);
        images.set(tensors.images.data.subarray(first * this.model.inputs, last * this.model.inputs), labels.length * this.model.inputs);
        for (let n = first; n < last; n++) labels.push(Number(tensors.labels.data[n]));
      }
      before += samples;
    }
    return { images, labels };
  }
}

await new Trainer(process.env).train();
