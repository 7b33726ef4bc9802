// Drives a server with Google's JavaScript client, what is stored and what has a session: `node stored.mjs MODULE URL`,
// one JSON object on stdout. The server echoes the last line of its prompt after "re ".

import { pathToFileURL } from 'node:url';

const [module, url] = process.argv.slice(2);
const { GoogleGenAI } = await import(pathToFileURL(module).href);
const out = {};
const ai = new GoogleGenAI({ apiKey: 'any', httpOptions: { baseUrl: url } });

async function failure(run) {
  try {
    await run();
    return null;
  } catch (error) {
    return { status: error.status, message: error.message };
  }
}

function textOf(interaction) {
  return interaction.steps
    .filter((step) => step.type === 'model_output')
    .flatMap((step) => step.content.map((part) => part.text))
    .join('');
}

async function collect(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  const deltas = events.filter((event) => event.event_type === 'step.delta').map((event) => event.delta.text);
  return { kinds: [...new Set(events.map((event) => event.event_type))], text: deltas.join(''), events };
}

const first = await ai.interactions.create({ model: 'fake', input: 'one' });
const second = await ai.interactions.create({ model: 'fake', input: 'two', previous_interaction_id: first.id });
out.whole = [textOf(first), textOf(second), first.status, second.usage.total_tokens];
const streamed = await collect(await ai.interactions.create({ model: 'fake', input: 'three', stream: true }));
out.streamed = { text: streamed.text, kinds: streamed.kinds };
const id = streamed.events.at(-1).interaction.id;
const replayed = await collect(await ai.interactions.get(id, { stream: true }));
const from = replayed.events.find((event) => event.event_type === 'step.delta').event_id;
const rest = await collect(await ai.interactions.get(id, { stream: true, last_event_id: from }));
out.replayed = [replayed.text, rest.events.length < replayed.events.length];
const background = await ai.interactions.create({ model: 'fake', input: 'slow', background: true });
out.background = background.status;
out.cancelled = (await ai.interactions.cancel(background.id)).status;
await ai.interactions.delete(first.id);
out.gone = await failure(() => ai.interactions.get(first.id));
out.bad = await failure(() => ai.interactions.create({ model: 'fake', input: 'x', generation_config: { seed: 'x' } }));

const cache = await ai.caches.create({ model: 'fake', config: { contents: 'a document ', ttl: '300s' } });
const names = [];
for await (const one of await ai.caches.list()) names.push(one.name);
const later = await ai.caches.update({ name: cache.name, config: { ttl: '600s' } });
const cached = await ai.models.generateContent({
  model: 'fake',
  contents: 'What?',
  config: { cachedContent: cache.name },
});
out.cache = {
  listed: names.includes(cache.name),
  later: later.expireTime > cache.expireTime,
  tokens: [cache.usageMetadata.totalTokenCount, cached.usageMetadata.cachedContentTokenCount],
  text: cached.text,
};
await ai.caches.delete({ name: cache.name });

// A session: two turns, then the first frame of one that is not possible.
function live(model, words) {
  return new Promise((resolve) => {
    const seen = { texts: [''], usage: null, handle: null, closed: null };
    let session = null;
    const say = () => {
      if (words.length) session.sendClientContent({ turns: words.shift(), turnComplete: true });
      else session.close();
    };
    const started = ai.live.connect({
      model,
      config: { responseModalities: ['TEXT'], sessionResumption: {} },
      callbacks: {
        onmessage: (message) => {
          seen.texts[seen.texts.length - 1] += message.text ?? '';
          if (message.sessionResumptionUpdate) seen.handle = message.sessionResumptionUpdate.newHandle;
          if (message.serverContent?.turnComplete) {
            seen.usage = message.usageMetadata;
            seen.texts.push('');
            say();
          }
        },
        onclose: (event) => {
          seen.closed = event.code;
          resolve(seen);
        },
        onerror: () => {},
      },
    });
    started.then(
      (one) => {
        session = one;
        say();
      },
      () => {}, // from 3.x on, a session that is refused also fails here
    );
  });
}

out.live = await live('fake', ['one', 'two']);
out.badLive = (await live('none', ['x'])).closed;

console.log(JSON.stringify(out));
