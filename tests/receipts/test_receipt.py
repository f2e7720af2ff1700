# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest

from nemo_rl_ext.receipts.receipt import Frames, ItemReceipt, Receipt, prompt_digest, read_receipt
from nemo_rl_ext.receipts.store import ReceiptStore, rollout_key

ITEM = ItemReceipt(
    kind="video",
    pixels="ab" * 32,
    served="ab" * 32,
    size=(4, 96, 128, 3),
    range=(1, 167),
    runs=((1, 167),),
    geometry={"pixel_values_flat_video": {"shape": [4, 3, 96, 128]}, "frames_indices": [0, 12, 24, 36]},
    frames=Frames(indices=(0, 12, 24, 36), fps=24.0, total=48),
)


def receipt(*items, ids=(1, 2, 3), **budget):
    return Receipt(prompt_tokens=len(ids), prompt=prompt_digest(ids), items=items, **budget)


def test_a_receipt_survives_json_and_stays_small():
    whole = receipt(ITEM, max_model_len=657, processor_cache="LruKeyReplicatedSenderCache")
    text = json.dumps(whole.as_dict())
    assert read_receipt(json.loads(text)) == whole
    assert len(text) < 700


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 2, "prompt_tokens": 1, "prompt": ""}, "expected version 1, found 2"),
        ({"prompt_tokens": "many", "prompt": ""}, "prompt_tokens"),
        ({"prompt": ""}, "missing required field `prompt_tokens`"),
        (
            {"prompt_tokens": 1, "prompt": "", "items": [{"kind": "image", "runs": [[1]]}]},
            r"items\[0\].runs\[0\]",
        ),
    ],
)
def test_what_is_not_a_receipt_is_refused_by_field(values, message):
    with pytest.raises(ValueError, match=f"media receipt: .*{message}|{message}"):
        read_receipt(values)


def test_a_prompt_s_digest_does_not_depend_on_how_ids_are_held():
    assert prompt_digest([1, 2, 3]) == prompt_digest(np.array([1, 2, 3], dtype=np.int64))
    assert prompt_digest([1, 2, 3]) != prompt_digest([1, 23])


def test_a_rollout_s_key_holds_all_that_survives_an_agent():
    key = rollout_key([1, 2], [3], [-0.25])
    # JSON gives back the same float32.
    logprob = float(np.float32(-1.2345678))
    assert rollout_key([1], [2], [logprob]) == rollout_key([1], [2], json.loads(json.dumps([logprob])))
    assert key not in {
        rollout_key([1], [2, 3], [-0.25]),
        rollout_key([1, 2], [3], [-0.5]),
        rollout_key([1, 2, 3], [], []),
    }


def test_a_store_forgets_the_oldest_and_answers_again_after_a_retry():
    store = ReceiptStore(capacity=2)
    for name in "abc":
        store.put([name], receipt(ids=(ord(name),)))
    assert [found is not None for found in store.get(["a", "b", "c", "c"])] == [False, True, True, True]


def test_one_key_for_different_media_is_no_evidence():
    import msgspec

    store = ReceiptStore()
    store.put(["same", "other"], receipt(ITEM))
    store.put(["same"], receipt(msgspec.structs.replace(ITEM, cached=True)))
    assert store.get(["same"])[0] is not None
    store.put(["same"], receipt(msgspec.structs.replace(ITEM, served="cd" * 32)))
    store.put(["same"], receipt(ITEM))
    assert store.get(["same", "other"]) == [None, receipt(ITEM)]
