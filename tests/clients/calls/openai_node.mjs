// OpenAI's SDK for Node: what came of each call, as JSON.
import { createRequire } from "node:module";

const { OpenAI, toFile } = createRequire(process.env.PACKAGES)("openai");
const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.KEY, maxRetries: 1 });
const messages = [{ role: "user", content: "Is it windy in Oslo?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const said = { models: (await client.models.list()).data.map((model) => model.id), errors: {} };
const answer = await client.chat.completions.create({ model: "m", messages, max_tokens: 8, temperature: 0 });
said.chat = answer.choices[0].message.content;
said.stream = "";
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ model: "m", messages, max_tokens: 8, temperature: 0, ...options })) {
  said.stream += chunk.choices[0]?.delta.content ?? "";
  said.usage = chunk.usage?.completion_tokens;
}
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const called = await client.chat.completions.create({ model: "m", messages, tools, tool_choice: "required", temperature: 0 });
const call = called.choices[0].message.tool_calls[0].function;
[said.tool, said.arguments] = [call.name, call.arguments];
const response = await client.responses.create({ model: "m", input: "Is it windy?", max_output_tokens: 8, temperature: 0 });
said.response = response.output_text;
said.events = [];
for await (const event of client.responses.stream({ model: "m", input: "Is it windy?", max_output_tokens: 8, temperature: 0 })) {
  if (!said.events.includes(event.type)) { // as many of a kind as there were pieces
    said.events.push(event.type);
  }
}
const texts = ["the watch begins", "the sun", "the watch begins"];
const embedder = client.withOptions({ baseURL: process.env.EMBEDDINGS_URL });
const vectors = (await embedder.embeddings.create({ model: "e", input: texts })).data.map((one) => one.embedding);
const same = (one, other) => JSON.stringify(vectors[one]) === JSON.stringify(vectors[other]);
said.embeddings = [vectors.length, vectors[0].length, same(0, 2), same(0, 1)];
const url = "/v1/chat/completions";
const lines = ["a", "b", "c"].map((name) => JSON.stringify({ custom_id: name, method: "POST", url, body: { model: "m", messages, max_tokens: 4 } }));
const start = async () => {
  const file = await client.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch" });
  return client.batches.create({ input_file_id: file.id, endpoint: url, completion_window: "24h" });
};
const ended = async (batch) => {
  while (["validating", "in_progress", "finalizing", "cancelling"].includes(batch.status)) {
    await new Promise((resolve) => { setTimeout(resolve, 100); });
    batch = await client.batches.retrieve(batch.id);
  }
  return batch;
};
// Only a gateway has batches; an emulated instance refuses half a surrogate pair.
if (process.env.BATCHES) {
  const cut = "cut within a character \ud83d";
  const ending = [{ role: "user", content: cut }];
  said.cut = (await client.chat.completions.create({ model: "m", messages: ending, max_tokens: 2 })).id;
  const batch = await ended(await start());
  const answers = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map((text) => JSON.parse(text));
  said.batch = { status: batch.status, counts: batch.request_counts, answered: answers.map((one) => one.custom_id).sort() };
  said.cancelled = (await ended(await client.batches.cancel((await start()).id))).status;
  said.listed = [(await client.batches.list()).data.length, (await client.files.list({ purpose: "batch" })).data.length];
  said.deleted = (await client.files.delete(batch.output_file_id)).deleted;
}
for (const [name, call] of Object.entries({
  model: () => client.chat.completions.create({ model: "none", messages }),
  value: () => client.chat.completions.create({ model: "m", messages, n: 0 }),
  key: () => client.withOptions({ apiKey: "ph_wrong" }).models.list(),
  embeddings: () => client.embeddings.create({ model: "m", input: "x" }),
})) {
  try {
    await call();
  } catch (error) {
    said.errors[name] = [error.constructor.name, error.status, error.code];
  }
}
console.log(JSON.stringify(said));
