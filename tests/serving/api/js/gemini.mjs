// Drives a server with Google's JavaScript client: `node gemini.mjs MODULE URL [KEY]`, one JSON object on stdout.
// MODULE is the entry of the package. The server echoes the last line of its prompt after "re ".

import { pathToFileURL } from 'node:url';

const [module, url, key = 'any'] = process.argv.slice(2);
const { GoogleGenAI, ApiError } = await import(pathToFileURL(module).href);
const out = {};

async function failure(run) {
  try {
    await run();
    return null;
  } catch (error) {
    return { api: error instanceof ApiError, status: error.status, message: error.message };
  }
}

for (const apiVersion of ['v1', 'v1beta', 'v1alpha']) {
  const ai = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: url, apiVersion } });
  const answer = await ai.models.generateContent({ model: 'fake', contents: 'Hi' });
  const chunks = [];
  for await (const chunk of await ai.models.generateContentStream({ model: 'fake', contents: 'Hi' })) chunks.push(chunk);
  const names = [];
  for await (const model of await ai.models.list()) names.push(model.name);
  out[apiVersion] = {
    text: answer.text,
    usage: answer.usageMetadata,
    streamed: chunks.map((chunk) => chunk.text).join(''),
    finish: chunks.at(-1).candidates[0].finishReason,
    streamedUsage: chunks.at(-1).usageMetadata,
    count: (await ai.models.countTokens({ model: 'fake', contents: 'Hi' })).totalTokens,
    names,
    model: (await ai.models.get({ model: 'fake' })).name,
  };
}

const ai = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: url + '/' } });

const chat = ai.chats.create({ model: 'fake' });
out.chat = [];
for (const message of ['one', 'two', 'three']) {
  let text = '';
  for await (const chunk of await chat.sendMessageStream({ message })) text += chunk.text;
  out.chat.push(text);
}
out.chat.push((await chat.sendMessage({ message: 'four' })).text);
out.history = chat.getHistory(true).length;

const config = {
  systemInstruction: 'be nice',
  temperature: 0.5,
  topK: 40,
  candidateCount: 2,
  responseLogprobs: true,
  logprobs: 2,
  seed: 7,
  thinkingConfig: { includeThoughts: true, thinkingBudget: 0 },
};
const full = await ai.models.generateContent({ model: 'fake', contents: 'all', config });
out.full = {
  candidates: full.candidates.length,
  tokens: full.candidates[1].logprobsResult.chosenCandidates.map((one) => one.token).join(''),
};

out.badOption = await failure(() => ai.models.generateContent({ model: 'fake', contents: 'x', config: { temperature: 5 } }));
out.badModel = await failure(() => ai.models.generateContent({ model: 'no-such', contents: 'x' }));
out.badStream = await failure(async () => {
  for await (const _ of await ai.models.generateContentStream({ model: 'fake', contents: 'fail' }));
});
console.log(JSON.stringify(out));
