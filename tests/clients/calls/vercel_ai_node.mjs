// Vercel's AI SDK: streams with tools and typed objects, by chat and by Responses, as JSON.
import { createRequire } from "node:module";

const load = createRequire(process.env.PACKAGES);
const { APICallError, generateObject, generateText, jsonSchema, streamText, tool } = load("ai");
const { createOpenAI } = load("@ai-sdk/openai");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const given = { baseURL: process.env.BASE_URL, apiKey: process.env.KEY };
const openai = createOpenAI(given);
const compatible = createOpenAICompatible({ name: "pilothouse", includeUsage: true, supportsStructuredOutputs: true, ...given });
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
});
const tools = { weather: tool({ description: "The weather in a city.", inputSchema: schema }) };
const prompt = "Is it windy in Oslo?";
const asked = { prompt, temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const said = { errors: {} };
for (const [name, model] of Object.entries({ responses: openai("m"), chat: openai.chat("m"), compatible: compatible("m") })) {
  const text = streamText({ ...asked, model, maxOutputTokens: 8 });
  const calling = streamText({ ...asked, model, tools, toolChoice: "required" });
  const parts = [];
  for await (const part of calling.fullStream) {
    parts.push(part.type);
    if (part.type === "error") {
      throw part.error;
    }
  }
  said[name] = {
    text: await text.text,
    usage: (await text.usage).outputTokens,
    parts: [...new Set(parts)],
    calls: (await calling.toolCalls).map((call) => [call.toolName, call.input]),
    object: (await generateObject({ ...asked, model, schema })).object,
  };
}
const wrong = createOpenAI({ ...given, apiKey: "ph_wrong" });
for (const [name, model] of Object.entries({ model: openai("none"), key: wrong.chat("m") })) {
  try {
    await generateText({ ...asked, model });
  } catch (error) {
    said.errors[name] = [APICallError.isInstance(error) ? "APICallError" : error.name, error.statusCode];
  }
}
console.log(JSON.stringify(said));
