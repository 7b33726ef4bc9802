// Drives a server with OpenAI's JavaScript client, what it stores: `node responses.mjs MODULE URL`, one JSON object on
// stdout. The server echoes the last line of its prompt after "re ".

import { pathToFileURL } from 'node:url';

const [module, url] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(module).href);
const client = new OpenAI({ apiKey: 'any', baseURL: `${url}/v1`, maxRetries: 0 });
const out = {};

const first = await client.responses.create({ model: 'fake', input: 'one' });
const second = await client.responses.create({ model: 'fake', input: 'two', previous_response_id: first.id });
out.texts = [first.output_text, second.output_text];

const begun = await client.responses.create({ model: 'fake', input: 'three', background: true, stream: true });
const seen = [];
for await (const event of begun) {
  seen.push(event);
  if (seen.length === 6) break;
}
const after = seen.at(-1).sequence_number;
const rest = await client.responses.retrieve(seen[0].response.id, { stream: true, starting_after: after });
for await (const event of rest) seen.push(event);
out.numbers = seen.every((event, i) => event.sequence_number === i);
out.text = seen.filter((event) => event.type === 'response.output_text.delta').map((event) => event.delta).join('');
out.last = seen.at(-1).type;

const slow = await client.responses.create({ model: 'fake', input: 'slow', background: true });
out.cancelled = [slow.status, (await client.responses.cancel(slow.id)).status];
await client.responses.delete(first.id);
try {
  await client.responses.retrieve(first.id);
} catch (error) {
  out.gone = error.status;
}
console.log(JSON.stringify(out));
