# SPDX-License-Identifier: Apache-2.0
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from nemo_rl_ext.distill.config import LossConfig  # noqa: E402
from nemo_rl_ext.distill.losses import distill_sums, kl_per_token  # noqa: E402


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 6, 11, generator=generator, dtype=torch.float64) * 2 for _ in range(2))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_forward_and_reverse_kl_equal_torch(logits, temperature):
    student, teacher = (x.flatten(0, 1) for x in logits)
    s, t = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    forward = F.kl_div(s, t, log_target=True, reduction="none").sum(-1) * temperature**2
    reverse = F.kl_div(t, s, log_target=True, reduction="none").sum(-1) * temperature**2
    got = kl_per_token(student, teacher, temperature=temperature)
    torch.testing.assert_close(got.double(), forward, rtol=1e-5, atol=1e-6)
    got = kl_per_token(student, teacher, direction="reverse", temperature=temperature)
    torch.testing.assert_close(got.double(), reverse, rtol=1e-5, atol=1e-6)


def test_gradient_of_forward_kl_is_the_difference_of_the_distributions(logits):
    student, teacher = (x.flatten(0, 1) for x in logits)
    student.requires_grad_()
    kl_per_token(student, teacher, temperature=2.0).sum().backward()
    expected = 2.0 * ((student / 2).softmax(-1) - (teacher / 2).softmax(-1))
    torch.testing.assert_close(student.grad, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_top_k_with_a_tail_bucket_grows_to_the_full_divergence(logits, direction):
    student, teacher = (x.flatten(0, 1) for x in logits)
    full = kl_per_token(student, teacher, direction=direction)
    before = torch.zeros_like(full)
    for k in range(1, 12):
        now = kl_per_token(student, teacher, direction=direction, top_k=k)
        assert (now >= before - 1e-5).all()
        before = now
    torch.testing.assert_close(before, full)


def test_renormalised_top_k_equals_softmax_over_the_kept_logits(logits):
    student, teacher = (x.flatten(0, 1) for x in logits)
    kept = teacher.topk(3).indices
    s, t = student.gather(-1, kept), teacher.gather(-1, kept)
    expected = kl_per_token(s, t)
    got = kl_per_token(student, teacher, top_k=3, top_k_tail="renormalize")
    torch.testing.assert_close(got, expected)


def test_student_mass_outside_the_top_k_costs_only_with_the_bucket():
    teacher = torch.tensor([[9.0, 8.0, -9.0, -9.0]])
    inside, outside = torch.tensor([[9.0, 8.0, -9.0, -9.0]]), torch.tensor([[9.0, 8.0, 12.0, -9.0]])
    assert kl_per_token(inside, teacher, top_k=2) < 1e-6
    assert kl_per_token(outside, teacher, top_k=2) > 1
    assert kl_per_token(outside, teacher, top_k=2, top_k_tail="renormalize") < 1e-6


def test_a_confident_teacher_gives_finite_losses_and_gradients():
    teacher = torch.full((1, 1000), -80.0)
    teacher[0, 7] = 80.0
    for direction in ("forward", "reverse"):
        student = torch.zeros(1, 1000, requires_grad=True)
        loss = kl_per_token(student, teacher, direction=direction, top_k=5)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(student.grad).all()


def sums(logits, mask, labels=None, **settings):
    student, teacher = logits
    hidden = student[..., :4] * 2
    if labels is None:
        labels = torch.arange(12).view(2, 6) % 11
    return distill_sums(
        student_logits=student,
        teacher_logits=teacher,
        labels=labels,
        mask=mask,
        config=LossConfig(**settings),
        student_hidden=hidden,
        teacher_hidden=torch.zeros_like(hidden),
    )


def test_sums_mix_the_terms_over_masked_tokens_only(logits):
    student, teacher = logits
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    got = sums(logits, mask, kd_weight=0.5, ce_weight=2.0, hidden_weight=3.0)
    kd = kl_per_token(student[mask], teacher[mask]).sum()
    ce = F.cross_entropy(student[mask].float(), torch.tensor([2, 3, 0]), reduction="sum")
    hidden = (student[mask][:, :4].float() * 2).square().mean(-1).sum()
    assert got.tokens == 3
    torch.testing.assert_close(got.loss, 0.5 * kd + 2 * ce + 3 * hidden, check_dtype=False)


def test_nothing_outside_the_mask_is_read(logits):
    student, teacher = logits
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 2] = True
    labels = torch.full((2, 6), 10**9)  # out of range wherever the mask is false
    labels[1, 2] = 3
    student.requires_grad_()
    got = sums((student, teacher), mask, labels, ce_weight=1.0)
    got.loss.backward()
    assert torch.isfinite(got.loss)
    assert student.grad[~mask].abs().max() == 0 < student.grad[mask].abs().max()


def test_chunks_change_neither_value_nor_gradient(logits):
    mask = torch.ones(2, 6, dtype=torch.bool)
    results = []
    for chunk in (1, 5, 1024):
        student = logits[0].clone().requires_grad_()
        got = sums((student, logits[1]), mask, ce_weight=0.5, top_k=4, chunk_tokens=chunk)
        got.loss.backward()
        results.append((got.loss.detach(), student.grad))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])


def test_no_token_at_all_is_an_exact_zero_with_a_backward_pass(logits):
    student = logits[0].requires_grad_()
    got = sums((student, logits[1]), torch.zeros(2, 6, dtype=torch.bool), ce_weight=1.0, hidden_weight=1.0)
    got.loss.backward()
    assert got.loss == 0 == got.tokens
    assert student.grad is not None and student.grad.abs().max() == 0


def test_sums_of_parts_equal_the_sum_of_the_whole(logits):
    """What makes the reduction exact: any cut of the tokens, however uneven, adds up."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    whole = sums(logits, mask, ce_weight=1.0)
    first, second = mask.clone(), mask.clone()
    first[:, 2:], second[:, :2] = False, False
    parts = [sums(logits, part, ce_weight=1.0) for part in (first, second)]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    mean_of_means = sum(part.loss / part.tokens for part in parts) / 2
    assert abs(mean_of_means - whole.loss / whole.tokens) > 1e-2


def test_shapes_that_disagree_are_refused(logits):
    student, teacher = logits
    with pytest.raises(ValueError, match="shared vocabulary"):
        sums((student, teacher[..., :-1]), torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="hidden"):
        distill_sums(
            student_logits=student,
            teacher_logits=teacher,
            labels=torch.zeros(2, 6, dtype=torch.long),
            mask=torch.ones(2, 6, dtype=torch.bool),
            config=LossConfig(hidden_weight=1.0),
            student_hidden=torch.zeros(2, 6, 3),
            teacher_hidden=torch.zeros(2, 6, 4),
        )
