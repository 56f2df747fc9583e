"""Four workers packed on one device, on the quickstart's cache."""

from lightning.pytorch import Trainer

from tinyllm import LlamaConfig, TinyLLM, TokenDataModule
from tinyllm.strategies import DecentralizedStrategy

size = LlamaConfig(layers=4, width=192, heads=3, ffn_width=512, vocab_size=1024, context=128)
trainer = Trainer(
    strategy=DecentralizedStrategy(workers=4, topology="one_peer_exponential"),
    devices=1,
    max_steps=50,
    gradient_clip_val=1.0,
)
trainer.fit(TinyLLM(config=size), TokenDataModule("data/quickstart", context=128, batch_size=8))
