"""What is known of a Llama of three layers that nobody has made; torch-free."""

from engine.models.spec import ModelSpec

SPEC = ModelSpec(
    model_type="llama",
    vocab_size=128,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    max_position=256,
    rms_eps=1e-6,
    tied=False,
    dtype="float32",
)
