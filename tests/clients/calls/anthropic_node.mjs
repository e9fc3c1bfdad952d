// Anthropic's SDK for Node, which Claude Code uses: what came of each call, as JSON.
import { createRequire } from "node:module";

const { Anthropic } = createRequire(process.env.PACKAGES)("@anthropic-ai/sdk");
const baseURL = process.env.BASE_URL.replace(/\/v1$/, "");
const client = new Anthropic({ baseURL, apiKey: process.env.KEY, maxRetries: 1 });
const messages = [{ role: "user", content: "Is it windy in Oslo?" }];
const given = { model: "m", messages, temperature: 0 };
const answer = await client.messages.create({ ...given, max_tokens: 8 });
const said = { message: answer.content[0].text, type: answer.type, stop_reason: answer.stop_reason, errors: {} };
const stream = client.messages.stream({ ...given, max_tokens: 8, system: "Be brief." });
said.stream = "";
stream.on("text", (text) => { said.stream += text; });
said.usage = (await stream.finalMessage()).usage.output_tokens;
const tools = [{ name: "weather", input_schema: { type: "object", properties: { city: { type: "string" } } } }];
const choice = { type: "tool", name: "weather" };
const call = (await client.messages.create({ ...given, tools, tool_choice: choice, max_tokens: 64 })).content[0];
[said.tool, said.arguments] = [call.name, call.input];
said.tokens = (await client.messages.countTokens({ model: "m", messages })).input_tokens;
const byToken = new Anthropic({ baseURL, authToken: process.env.KEY, apiKey: null, maxRetries: 0 });
said.by_token = (await byToken.messages.create({ model: "m", messages, max_tokens: 2 })).role;
const other = new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 });
const calls = {
  model: () => client.messages.create({ model: "none", messages, max_tokens: 1 }),
  value: () => client.messages.create({ model: "m", messages, max_tokens: 0 }),
  key: () => other.messages.create({ model: "m", messages, max_tokens: 1 }),
};
for (const [name, call] of Object.entries(calls)) {
  try {
    await call();
  } catch (error) {
    said.errors[name] = [error.constructor.name, error.status, error.error.error.code];
  }
}
console.log(JSON.stringify(said));
