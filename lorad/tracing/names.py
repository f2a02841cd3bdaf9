"""The names that traces use: OpenTelemetry's conventions for generative AI, and lorad's own.

Goes in: nothing.  Comes out: strings.  The conventions are "Development" still and have moved
before: whatever they call these things next is changed here, and nowhere else.
"""

#: Of the server and of the spans.
SERVICE = "lorad"
QUEUE, PREFILL, DECODE = "lorad.queue", "lorad.prefill", "lorad.decode"
FIRST_TOKEN = "lorad.first_token"  # an event

CHAT, COMPLETION = "chat", "text_completion"  # operations

# gen_ai.*: https://opentelemetry.io/docs/specs/semconv/gen-ai/
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
TOP_K = "gen_ai.request.top_k"
SEED = "gen_ai.request.seed"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
CHOICES = "gen_ai.request.choice.count"
OUTPUT_TYPE = "gen_ai.output.type"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
FIRST_CHUNK_SECONDS = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR = "error.type"

# What the conventions have no word for.
ADAPTER = "lorad.adapter"
REV = "lorad.rev"
TENANT = "lorad.tenant"
CHOICE = "lorad.choice"  # which answer of the request a span is about
TOKENS = "lorad.tokens"
INPUTS = "lorad.inputs"  # texts that vectors or scores were made of

# Of the resource: the daemon itself.
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE = "service.instance.id"
BASE = "lorad.base"
