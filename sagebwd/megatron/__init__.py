"""The two attentions inside Megatron-core: core-attention modules, layer spec, model, and what a CPU needs.

Megatron-core warns at import and at each model of what this repository does on purpose; said here once instead: no
Transformer Engine and no Apex, no CUDA graphs, and GPTModel, whose successor 0.16 has not.
"""

import logging
import warnings

for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "MimoModelConfig is experimental",
):
    warnings.filterwarnings("ignore", message=_message)
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: "GPTModel IS DEPRECATED" not in record.getMessage()
)
