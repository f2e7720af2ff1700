# SPDX-License-Identifier: Apache-2.0
"""A processor with the output contract of the released Nemotron Omni checkpoints, on a vocabulary of eighteen words.

`processor(text, images, return_tensors)` gives `input_ids`, `attention_mask`, `pixel_values` ([images, 3, height,
width], or a list of [3, height, width] where sizes differ), `imgs_sizes`, `num_tokens` and `num_patches`. Copied into
checkpoint directories as their remote code, so it imports nothing of this project.
"""

import math

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BatchFeature, PreTrainedTokenizerFast
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

WORDS = (
    "<pad> <unk> <eos> <img> </img> <image> user assistant hello look at answer yes no Frame and frame :"
).split()


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=["<img>", "</img>", "<image>"],
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    return fast


class TinyOmniImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]

    def __init__(
        self,
        patch_size=16,
        min_num_patches=16,
        max_num_patches=13312,
        max_model_len=16384,
        downsample_ratio=0.5,
        norm_mean=(0.5, 0.5, 0.5),
        norm_std=(0.5, 0.5, 0.5),
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.patch_size, self.max_model_len = patch_size, max_model_len
        self.min_num_patches, self.max_num_patches = min_num_patches, max_num_patches
        self.downsample_ratio = downsample_ratio
        self.norm_mean, self.norm_std = list(norm_mean), list(norm_std)

    def grid(self, height, width, budget):
        rows, columns = round(height / self.patch_size + 0.5), round(width / self.patch_size + 0.5)
        factor = min(math.sqrt(budget / (rows * columns)), 1.0)
        rows, columns = max(1, math.floor(factor * rows)), max(1, math.floor(factor * columns))
        if budget > self.min_num_patches and rows * columns < self.min_num_patches:
            factor = math.sqrt(self.min_num_patches / (rows * columns))
            rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
        if rows % 2:
            rows = rows + 1 if (rows + 1) * columns <= budget else max(2, rows - 1)
        if columns % 2:
            columns = columns + 1 if rows * (columns + 1) <= budget else max(2, columns - 1)
        return rows, columns

    def preprocess(self, images, return_tensors=None, **kwargs):
        images = images if isinstance(images, list) else [images]
        budget = max((self.max_model_len - 4) * 4, self.min_num_patches * len(images))
        budget = max(min(budget, self.max_num_patches), self.min_num_patches)
        pixels, sizes, tokens = [], [], []
        for image in images:
            rows, columns = self.grid(image.height, image.width, budget)
            array = np.asarray(image.convert("RGB"), dtype=np.uint8).copy()
            tensor = torch.from_numpy(array).permute(2, 0, 1)[None].float()
            size = (rows * self.patch_size, columns * self.patch_size)
            tensor = torch.nn.functional.interpolate(
                tensor, size=size, mode="bicubic", align_corners=False, antialias=True
            )
            mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (self.norm_mean, self.norm_std))
            pixels.append(((tensor / 255.0 - mean) / std)[0])
            sizes.append(size)
            tokens.append(rows * columns // 4)
        same = len({tuple(image.shape) for image in pixels}) == 1
        return BatchFeature(
            {
                "pixel_values": torch.stack(pixels) if same else pixels,
                "num_patches": [1] * len(images),
                "num_tokens": tokens,
                "imgs_sizes": sizes,
            },
            tensor_type=return_tensors if same else None,
        )


class NemotronH_Nano_Omni_Reasoning_V3Processor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    model_input_names = ["input_ids", "attention_mask", "pixel_values", "num_patches"]

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.image_start_token, self.image_end_token = "<image>", "<img>", "</img>"
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images=None, text=None, return_tensors=None, **kwargs):
        texts = [text] if isinstance(text, str) else list(text)
        data = {}
        if images is not None:
            data = dict(self.image_processor(images=images, return_tensors=return_tensors))
            tokens = iter([int(count) for count in data.pop("num_tokens")])
            texts = [self._expand(part.split("<image>"), tokens) for part in texts]
        encoded = self.tokenizer(texts, return_tensors=None)
        same = not images or not isinstance(data.get("pixel_values"), list)
        return BatchFeature({**encoded, **data}, tensor_type=return_tensors if same else None)

    @staticmethod
    def _expand(parts, tokens):
        tail = ["<img>" + "<image>" * next(tokens) + "</img>" + part for part in parts[1:]]
        return "".join([parts[0], *tail])


class NemotronH_Omni_Reasoning_V3Processor(NemotronH_Nano_Omni_Reasoning_V3Processor):
    pass
