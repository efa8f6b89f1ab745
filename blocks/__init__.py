"""Residual layers, layer patterns, language models, training, generation and inspection.

`dir(deltazoo.blocks)` lists the public names.
"""

from deltazoo import by_name, lazy_exports

_MODULES = by_name(
    {
        "deltazoo.backends.io.progress": ["Progress", "silent"],
        "deltazoo.blocks.model.compilation": ["compile_layers"],
        "deltazoo.blocks.training.evaluation": ["Evaluation"],
        "deltazoo.blocks.generation.completion": ["Completion"],
        "deltazoo.blocks.generation.decoder": ["Decoder"],
        "deltazoo.blocks.generation.generate": ["generate_tokens", "stream"],
        "deltazoo.blocks.generation.sampling": ["Sampling"],
        "deltazoo.blocks.generation.tokenized": ["TokenCompletion"],
        "deltazoo.blocks.inspect.layer_table": ["Description", "LayerRow"],
        "deltazoo.blocks.model.layer": ["Layer", "LayerOutput", "LayerSpec"],
        "deltazoo.blocks.model.losses": ["Losses"],
        "deltazoo.blocks.model.mlp": ["Dense"],
        "deltazoo.blocks.model.moe": ["MoE"],
        "deltazoo.blocks.parallel.context": ["ContextBatch", "ContextParallel"],
        "deltazoo.blocks.spec.stack_spec": ["StackSpec", "preset"],
        "deltazoo.blocks.model.stack": ["LanguageModel"],
        "deltazoo.mixers.core.patterns": ["At", "Spread"],
        "deltazoo.blocks.training.objective": ["Objective"],
        "deltazoo.blocks.training.config": ["TrainConfig"],
        "deltazoo.blocks.training.records": ["Point", "Training"],
        "deltazoo.blocks.data.loader": ["Loader"],
        "deltazoo.blocks.data.order": ["Mixture", "Source"],
        "deltazoo.blocks.data.prefetch": ["Prefetch"],
        "deltazoo.blocks.data.shards": ["TokenShards", "open_shards"],
        "deltazoo.blocks.data.text": ["Text", "load_text"],
        "deltazoo.blocks.data.tokenizer": ["Tokenizer"],
        "deltazoo.blocks.data.writing": ["ShardConfig", "write_shards"],
    }
)
__getattr__, __dir__ = lazy_exports(__name__, lambda: _MODULES)
