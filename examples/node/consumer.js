// Sends one request to a processor, and prints the id and the logprob of each token on a line.
//
//     node consumer.js tcp://127.0.0.1:5571 "The old man" 16
//
// This program speaks the client protocol of proto/tokenbus/v1/client.proto on one connection.
// If the connection or the processor is lost, this program fails.
// A client that should continue must send a new hello and resume its requests.
'use strict';
const { randomBytes } = require('node:crypto');
const { Dealer } = require('zeromq');
const { decode, rows } = require('./contract');
const { message, values } = require('./schema');

const [address = 'tcp://127.0.0.1:5571', prompt = 'The old man', count = '16'] = process.argv.slice(2);
const [ClientFrame, ServerFrame] = [message('ClientFrame'), message('ServerFrame')];
// Statuses above ROW_STATUS_FINISHED_LENGTH mean that the request failed.
const { ROW_STATUS_FINISHED_STOP, ROW_STATUS_FINISHED_LENGTH } = values('RowStatus');
const drawn = () => (randomBytes(8).readBigUInt64LE() | 1n).toString(); // a random integer as a string, never "0"

const key = drawn();
const window = { window_frames: 64, window_bytes: 8 * 2 ** 20 };
const hello = { schema_major: 1, schema_minor: 0, name: 'node', session: drawn(), ...window };
const sampling = { max_tokens: Number(count) };
const generate = { request_id: key, text: { text: prompt }, sampling, top_logprobs: 0 };

// All times are in milliseconds. The processor's welcome sets the interval and the timeout.
const socket = new Dealer({ linger: 1000, receiveTimeout: 100 });
let [interval, timeout] = [1000, 10_000];
let [isWelcome, isDone, next, lastSent, lastHeard, echo] = [false, false, 0, -Infinity, performance.now(), '0'];

async function say(body) {
  lastSent = performance.now();
  await socket.send(ClientFrame.encode(ClientFrame.fromObject(body)).finish());
}

/** Print the request's new tokens. If a row is repeated, its position tells which of its tokens are new. */
function print(batch) {
  for (const { position, status, tokens } of [...rows(batch)].filter((row) => row.key === key)) {
    if (position > next) throw new Error(`the tokens from ${next} to ${position} are missing`);
    for (const { id, logprob } of tokens.slice(next - position)) console.log(`${id} ${logprob}`);
    next = Math.max(next, position + tokens.length);
    isDone = status >= ROW_STATUS_FINISHED_STOP;
    if (status > ROW_STATUS_FINISHED_LENGTH) throw new Error(`it ended with status ${status}`);
  }
}

async function take([data, ...batches]) {
  const frame = ServerFrame.decode(data);
  lastHeard = performance.now();
  if (frame.welcome && !isWelcome) {
    [isWelcome, interval, timeout] = [true, frame.welcome.heartbeat_interval_ms, frame.welcome.heartbeat_timeout_ms];
    await say({ generate });
  }
  if (frame.heartbeat) echo = frame.heartbeat.sent_at_ns.toString();
  if (frame.admitted) console.error(`request ${key} at ${frame.admitted.worker_id}`);
  if (frame.outputs) print(decode(batches[0])); // batches[1] is a draft batch, if the request asked for one
  const failure = frame.refusal ?? frame.error ?? frame.goodbye;
  if (failure) throw new Error(failure.message || 'the processor closes');
  // The processor sends no more frames than the window allows until this client acknowledges some of them.
  if (frame.number.toString() !== '0') await say({ confirm: { through_number: frame.number } });
}

async function run() {
  socket.connect(address);
  while (!isDone) {
    if (performance.now() - lastHeard > timeout) throw new Error(`the processor is silent for ${timeout} ms`);
    if (performance.now() - lastSent >= interval) {
      await say(isWelcome ? { heartbeat: { sent_at_ns: process.hrtime.bigint().toString(), echo_ns: echo } } : { hello });
    }
    try {
      await take(await socket.receive());
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error; // no message arrived within receiveTimeout
    }
  }
}

run()
  .catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
  })
  .then(() => say({ goodbye: { reason: values('GoodbyeReason').GOODBYE_REASON_STOPPED } }))
  .finally(() => socket.close());
