# SPDX-License-Identifier: Apache-2.0
"""Shapes of NeMo-RL's modules, for the few places where one of its names is unavoidable.

`nemo_rl_shapes` puts modules with NeMo-RL's names and signatures into `sys.modules`, each as small as what the hooks
rely on; `nemo_rl_tree` writes source text that the probe accepts. Nothing here stands for NeMo-RL's behaviour: the
same hooks run against a real checkout in tests/nemo_rl. Processor, media, aligner and verdicts are real.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import sys
import types
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_rl_ext.media.identity import file_digest, pixel_digest
from nemo_rl_ext.receipts.receipt import ItemReceipt, Receipt, prompt_digest

START, CONTEXT, END = 3, 5, 4


def _tiny_processor():
    """The real processor of tests/nemo_rl, which checkpoints there carry as their remote code."""
    path = Path(__file__).parents[1] / "nemo_rl" / "tiny_processor.py"
    spec = importlib.util.spec_from_file_location("tiny_processor", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("tiny_processor", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def processor():
    tiny = _tiny_processor()
    return tiny.NemotronH_Nano_Omni_Reasoning_V3Processor(
        tiny.TinyOmniImageProcessor(), tiny.make_tokenizer()
    )


@pytest.fixture(scope="session")
def family(processor):
    from nemo_rl_ext.align.families.nemotron import NemotronFamily

    return NemotronFamily.from_processor(processor)


@pytest.fixture(scope="session")
def rows():
    """Makers of Gym rows and results."""
    return types.SimpleNamespace(prompt=prompt_ids, row=image_row, result=gym_result, url=picture_url)


def prompt_ids(runs):
    ids = [6]
    for run in runs:
        ids += [START, *[CONTEXT] * run, END]
    return [*ids, 9, 10]


def picture_url(height, width, seed=0, kind="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def image_row(urls, index=0, **extra):
    content = [{"type": "input_image", "image_url": url} for url in urls]
    return {
        "_rowidx": index,
        "responses_create_params": {"input": [{"role": "user", "content": content}]},
        **extra,
    }


def gym_result(row, runs, *, tool=None, sampled=(11, 12), grids=None):
    """A Gym result whose prompt has these runs; `tool=(url, runs)` adds a turn with one more image."""
    prompt, sampled = prompt_ids(runs), list(sampled)
    output = [{"prompt_token_ids": prompt, "generation_token_ids": sampled}]
    if grids is not None:
        output[0]["media_receipt"] = receipt_of(row, prompt, runs, grids)
    if tool is not None:
        url, tool_runs = tool
        output.append({"role": "user", "content": [{"type": "input_image", "image_url": url}]})
        longer = [*prompt, *sampled, *prompt_ids(tool_runs)]
        output.append({"prompt_token_ids": longer, "generation_token_ids": [13]})
    messages = row["responses_create_params"]["input"]
    return {
        "response": {"agent_input": messages, "output": output},
        "responses_create_params": {"input": messages},
        "reward": 0.0,
    }


def receipt_of(row, prompt, runs, grids):
    """What the engine would say of the first images of a row: their files, and these patch grids."""
    urls = [part["image_url"] for part in row["responses_create_params"]["input"][0]["content"]]
    items, start = [], 1
    for url, run, (height, width) in zip(urls, runs, grids, strict=False):
        data = base64.b64decode(url.partition(",")[2])
        digest = pixel_digest(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
        items.append(
            ItemReceipt(
                kind="image",
                pixels=digest,
                served=digest,
                file=file_digest(data),
                range=(start, run + 2),
                runs=((start + 1, run),),
                geometry={"imgs_sizes": [16 * height, 16 * width]},
            )
        )
        start += run + 2
    return Receipt(prompt_tokens=len(prompt), prompt=prompt_digest(prompt), items=tuple(items)).as_dict()


class PoolInThisProcess:
    """Answers like `rollout.pool.AlignerPool`, with one aligner and no Ray."""

    def __init__(self, aligner):
        self.aligner = aligner

    def submit_align(self, turns):
        return self.submit("align", turns)

    def submit(self, method, work):
        future = Future()
        try:
            future.set_result(getattr(self.aligner, method)(work))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def aligner(nemo_rl_shapes, tmp_path):
    from nemo_rl_ext.align.families.nemotron import Layout
    from nemo_rl_ext.integration.aligner import NemoRLAligner, NemoRLAlignerConfig
    from nemo_rl_ext.media.policy import MediaPolicy

    return NemoRLAligner(
        NemoRLAlignerConfig(
            model_dir=tmp_path,
            media_policy=MediaPolicy(roots=(tmp_path,)),
            layout=Layout.REMOTE,
            dtype=torch.float32,
            tokenizer_config={"name": "tiny"},
        )
    )


@pytest.fixture
def pool(aligner):
    return PoolInThisProcess(aligner)


@pytest.fixture
def nemo_rl_tree(tmp_path):
    """Source text with every function and name of the contract, as the probe reads it."""
    from nemo_rl_ext.integration.upstream_contract import ATTACHING, NAMES, TARGETS

    root = tmp_path / "tree" / "nemo_rl"
    text = {module: [f"{name} = ()" for name in names] for module, names in NAMES.items()}
    text["nemo_rl.package_info"] = ["MAJOR = 0", "MINOR = 6", "PATCH = 0"]
    module, name = ATTACHING[0]
    text[module] = [f"def {name}(user_message, *, images, processor):", "    pass"]
    for target in TARGETS:
        owner, _, function = target.name.rpartition(".")
        body = [
            f"{'async ' if target.is_async else ''}def {function}({', '.join(target.parameters)}):",
            *(f"    {name}()" for name in target.plain_calls),
            f"    return {list(target.mentions)!r}",
        ]
        lines = text.setdefault(target.module, [])
        if owner and f"class {owner}:" not in lines:
            lines.append(f"class {owner}:")
        at = lines.index(f"class {owner}:") + 1 if owner else len(lines)
        lines[at:at] = [f"    {line}" for line in body] if owner else body
    packages = {name.rpartition(".")[0] for name in text}
    for module, lines in text.items():
        path = root.joinpath(*module.split(".")[1:])
        path = path / "__init__.py" if module in packages else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def nemo_rl_shapes(monkeypatch, nemo_rl_tree, processor):
    """Modules under NeMo-RL's names; what of this package was imported over them is forgotten afterwards."""
    import ray

    from nemo_rl_ext.integration.in_process import uninstall
    from nemo_rl_ext.rollout import packed

    packed.packed_tensor_class()  # decided before a `nemo_rl` can be found
    package = types.ModuleType("nemo_rl")
    package.__spec__ = ModuleSpec("nemo_rl", None, is_package=True)
    package.__spec__.submodule_search_locations = [str(nemo_rl_tree)]
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "nemo_rl", package)

    def module(name, **contents):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(("nemo_rl", *parts[:end]))
            if full not in sys.modules:
                made = types.ModuleType(full)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, full, made)
                monkeypatch.setattr(sys.modules[full.rpartition(".")[0]], parts[end - 1], made, raising=False)
        vars(sys.modules[f"nemo_rl.{name}"]).update(contents)

    class RolloutDataFailure(Exception):
        pass

    names = frozenset({"NemotronH_Nano_Omni_Reasoning_V3Processor"})
    module("experience.failures", RolloutDataFailure=RolloutDataFailure)
    module("experience.rollouts", **_rollouts())
    module("experience.rollout_manager", attach_static_multimodal_payload=attach_static)
    module("data.multimodal_utils", **_multimodal(packed, processor), VIDEO_CONTENT_TYPES=("input_video",))
    vars(sys.modules["nemo_rl.data.multimodal_utils"])["_PLACEHOLDER_STYLE_PROCESSOR_NAMES"] = names
    module("environments.nemotron_utils", NEMOTRON_VIDEO_PROCESSOR_NAMES=names)
    module(
        "environments.nemo_gym_video",
        NEMOTRON_VIDEO_PROCESSOR_NAMES=names,
        _inject_vllm_mm_processor_kwargs=lambda row, kwargs: row.setdefault("kwargs", {}).update(kwargs),
    )
    module("algorithms.grpo", aggregate_rollout_metrics=averages)
    module(
        "algorithms.utils",
        get_tokenizer=lambda config, get_processor=False: processor if get_processor else processor.tokenizer,
    )
    module(
        "environments.nemo_gym",
        NemoGym=ray.remote(NemoGymShape),
        setup_nemo_gym_config=lambda config, tokenizer: None,
    )
    module("data.processors", PROCESSOR_REGISTRY={}, nemo_gym_data_processor=gym_datum)
    module("data.datasets.response_datasets", DATASET_REGISTRY={})
    module("data.datasets.response_datasets.nemogym_dataset", NemoGymDataset=DatasetShape)
    module("utils.config", **_configs())
    module("models.generation.vllm.video_utils", **_video_utils())
    yield sys.modules["nemo_rl"]
    uninstall()
    for name in ("actor", "data"):
        sys.modules.pop(f"nemo_rl_ext.integration.{name}", None)
        vars(sys.modules["nemo_rl_ext.integration"]).pop(name, None)


class NemoGymShape:
    def __init__(self, cfg):
        self.cfg, self.rch, self.head_server_config = cfg, None, None
        self._pad_dynamic_image_shapes = bool(cfg.get("pad_dynamic_image_shapes"))
        self._processor = None
        if cfg.get("tokenizer_config"):
            from nemo_rl.algorithms.utils import get_tokenizer

            self._processor = get_tokenizer(cfg["tokenizer_config"], get_processor=True)

    async def run_rollouts(self, nemo_gym_examples, timer_prefix, deduplicate_multimodal_data=False):
        for task in self.rch.run_examples(
            examples=nemo_gym_examples, head_server_config=self.head_server_config
        ):
            row, result = await task
            yield (
                row["_rowidx"],
                self._postprocess_nemo_gym_to_nemo_rl_result(
                    row, result, None, include_initial_multimodal_data=not deduplicate_multimodal_data
                ),
                None,
            )

    def _postprocess_nemo_gym_to_nemo_rl_result(
        self, nemo_gym_row, nemo_gym_result, tokenizer, *, include_initial_multimodal_data=True
    ):
        log, seen = [], 0
        for item in nemo_gym_result["response"]["output"]:
            if not item.get("generation_token_ids"):
                continue
            prompt, sampled = item.pop("prompt_token_ids"), item.pop("generation_token_ids")
            log.append({"role": "user", "token_ids": torch.tensor(prompt[seen:])})
            log.append({"role": "assistant", "token_ids": torch.tensor(sampled)})
            seen = len(prompt) + len(sampled)
        return {
            "message_log": log,
            "input_message_log": log[:1],
            "full_result": nemo_gym_result,
            "_initial_multimodal_data_omitted": not include_initial_multimodal_data,
        }


class DatasetShape:
    class Rows(list):
        def add_column(self, name, values):
            return type(self)({**row, name: value} for row, value in zip(self, values, strict=True))

    def __init__(self, data_path, repeat=1, **kwargs):
        self.data_config = kwargs
        self.dataset = self.Rows(
            {"extra_env_info": line} for line in Path(data_path).read_text().splitlines()
        )


def gym_datum(datum_dict, task_data_spec, tokenizer, max_seq_length, idx):
    if task_data_spec is not None and '"input_video"' not in datum_dict["extra_env_info"]:
        raise ValueError("static video in every row")
    return {"message_log": [{"role": "user", "token_ids": torch.tensor([])}], "datum": datum_dict}


def averages(per_group_metrics):
    return {key: sum(values) / len(values) for key, values in per_group_metrics.items()}


def attach_static(target_message_log, source_message_log):
    from nemo_rl_ext.rollout.provenance import media_of

    for source, target in zip(source_message_log, target_message_log, strict=False):
        target.update(media_of(source))


def _rollouts():
    def _reattach_static_multimodal_payloads_to_result(result, source_message_log):
        for view in ("input_message_log", "message_log"):
            attach_static(result[view], source_message_log)

    def _postprocess_single_nemo_gym_group(
        nemo_gym_rows, results, *args, mask_env_flagged_samples=True, **kw
    ):
        batch = {"loss_multiplier": torch.ones(len(results))}
        return types.SimpleNamespace(final_batch=batch, rollout_metrics={})

    return locals()


def _multimodal(packed, processor):
    def image_to_data_url(image):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def resolve_to_image(reference):
        return Image.open(reference.removeprefix("file://")).convert("RGB")

    def attach_image_model_inputs_to_message(message, *, images, processor, pad_dynamic_image_shapes=False):
        made = processor.image_processor.preprocess(images)
        pixels = made["pixel_values"]
        if isinstance(pixels, list):
            height, width = (max(image.shape[axis] for image in pixels) for axis in (1, 2))
            padded = torch.zeros(len(pixels), 3, height, width)
            for target, image in zip(padded, pixels, strict=True):
                target[:, : image.shape[1], : image.shape[2]] = image
            pixels = padded
        sizes = torch.tensor(made["imgs_sizes"], dtype=torch.int32)
        values = {
            "pixel_values": pixels,
            "imgs_sizes": sizes,
            "num_frames": torch.ones(len(sizes), dtype=torch.int64),
            "num_patches": torch.tensor(made["num_patches"]),
        }
        message.update({key: packed.pack(key, value) for key, value in values.items()})

    return {name: value for name, value in locals().items() if callable(value) and name not in ("processor",)}


def _video_utils():
    def _load_cached_video_frame_manifest(data, *, num_frames):
        if data == b"none":
            return None
        count = int(data)
        frames = np.stack([np.full((160, 320, 3), index, np.uint8) for index in range(count)])
        return frames, {"frames_indices": list(range(count)), "fps": 1.0, "total_num_frames": count}

    def load_video_frames_with_metadata(path, *, num_frames, temporal_patch_size, sampling_style):
        if path != "/clip.mp4":
            raise FileNotFoundError(path)
        return _load_cached_video_frame_manifest(str(num_frames).encode(), num_frames=-1)

    return locals()


def _configs():
    from omegaconf import OmegaConf

    def load_config(path):
        return OmegaConf.load(path)

    def parse_hydra_overrides(recipe, overrides):
        return OmegaConf.merge(recipe, OmegaConf.from_dotlist([word.lstrip("+") for word in overrides]))

    def register_omegaconf_resolvers():
        pass

    return {name: value for name, value in locals().items() if name.startswith(("load", "parse", "register"))}
