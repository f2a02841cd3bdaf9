// One question with one retry, or a stream that is left after its first chunks: what came of it.
import OpenAI from "openai";
import { Agent } from "undici";

const { LORAD_URL, LORAD_SOCKET, LORAD_API_KEY, LORAD_LEAVE } = process.env;
const dispatcher = LORAD_SOCKET ? new Agent({ connect: { socketPath: LORAD_SOCKET } }) : undefined;
const client = new OpenAI({
  baseURL: `${LORAD_URL}/v1`,
  apiKey: LORAD_API_KEY,
  maxRetries: 1,
  fetchOptions: { dispatcher },
});
const asked = { model: "tiny", messages: [{ role: "user", content: "x" }] };
let failed = null;
try {
  if (LORAD_LEAVE) {
    let left = 2;
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      if (--left === 0) break;
  } else await client.chat.completions.create(asked);
} catch (error) {
  failed = error.code ?? String(error);
}
console.log(JSON.stringify(failed));
process.exit(0);
