// All that openai-node is shown, as one line of JSON.
import OpenAI from "openai";
import { Agent } from "undici";

const { LORAD_URL, LORAD_SOCKET, LORAD_API_KEY, LORAD_FORMAT, LORAD_TOOL } = process.env;
const dispatcher = LORAD_SOCKET ? new Agent({ connect: { socketPath: LORAD_SOCKET } }) : undefined;
const knock = (apiKey) =>
  new OpenAI({ baseURL: `${LORAD_URL}/v1`, apiKey, fetchOptions: { dispatcher } });
const client = knock(LORAD_API_KEY);
const messages = [{ role: "user", content: "Say it." }];
const asked = { model: "acme/sql", messages, max_tokens: 12, temperature: 0 };
const seen = {};

seen.models = [];
for await (const model of client.models.list()) seen.models.push(model.id);
if ((await client.models.retrieve("acme/sql")).parent !== "tiny") throw new Error("no parent");

const chat = await client.chat.completions.create(asked);
seen.chat = chat.choices[0].message.content;
seen.rev = chat.system_fingerprint.split("-").at(-1);

const stream = await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
});
seen.streamed = "";
for await (const chunk of stream) {
  seen.streamed += chunk.choices[0]?.delta.content ?? "";
  if (chunk.usage) seen.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens];
}

const { messages: _, ...plain } = asked;
seen.plain = (await client.completions.create({ ...plain, prompt: "Once" })).choices[0].text;

const scored = await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 });
const tokens = scored.choices[0].logprobs.content;
seen.logprobs = [tokens.length, tokens[0].top_logprobs.length];

const parsed = await client.chat.completions.parse({
  ...asked,
  max_tokens: 200,
  response_format: JSON.parse(LORAD_FORMAT),
});
seen.colour = parsed.choices[0].message.parsed.colour;

const tooled = await client.chat.completions
  .stream({
    ...asked,
    model: "tooled",
    max_tokens: 200,
    tools: [JSON.parse(LORAD_TOOL)],
    tool_choice: "required",
  })
  .finalChatCompletion();
const call = tooled.choices[0].message.tool_calls[0].function;
seen.called = call.name;
seen.argument = JSON.parse(call.arguments).colour;

const failure = async (asking) => {
  try {
    await asking;
  } catch (error) {
    return error;
  }
};
const missing = await failure(client.chat.completions.create({ ...asked, model: "nobody" }));
if (!(missing instanceof OpenAI.NotFoundError)) throw new Error(`${missing}`);
seen.missing = [missing.status, missing.code];
const wrong = await failure(client.chat.completions.create({ ...asked, temperature: 9 }));
seen.wrong = [wrong.status, wrong.param];
if (!LORAD_SOCKET) {
  const stranger = await failure(knock("wrong").models.list());
  seen.stranger = [stranger.status, stranger.code];
}
console.log(JSON.stringify(seen));
process.exit(0);
