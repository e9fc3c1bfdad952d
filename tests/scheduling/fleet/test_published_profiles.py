"""Readers of published measurements, on rows in the published form and, where it is there, on the data itself."""

import os
from pathlib import Path
from statistics import median

import pytest

from scheduling.fleet.published_profiles import fit_all, read_blis, read_silicon, read_splitwise
from scheduling.table_files import TraceError

SILICON_COLUMNS = (
    "model_path,system,backend,precision,mode,isl,osl,batch_size,tp_size,attention_dp_size,moe_ep_size,"
    "silicon_ttft_ms,silicon_tpot_ms"
)


def silicon(path: Path, *rows: str) -> Path:
    file = path / "silicon.csv"
    file.write_text("\n".join((SILICON_COLUMNS, *rows)))
    return file


def test_silicon_rows_become_points(tmp_path: Path) -> None:
    file = silicon(
        tmp_path,
        "m,h100_sxm,vllm,fp8,agg,1024,1024,5,4,1,1,90,10",
        "m,h100_sxm,vllm,fp8,agg,1024,1024,5,4,1,1,92,10",
        "m,h100_sxm,vllm,fp8,agg,8192,16,33,4,1,1,100,40",
        "m,h100_sxm,vllm,fp8,agg,1024,1024,512,4,1,1,300000,10",  # waited for a place
        "m,h100_sxm,vllm,fp8,disagg,1024,1024,,,,,90,10",
        "m,h100_sxm,sglang,,agg,1024,1024,5,4,4,8,90,10",
    )
    other, plain = read_silicon(file, shared_prompts=0.1)
    assert str(other.setting) == "m on 4 x h100_sxm (sglang unstated precision DP4 EP8)"
    assert plain.setting.variant == "vllm fp8"
    assert plain.prefill.tokens.tolist() == [1024 * 1.4, 1024 * 1.4, 8192 * 4.2]
    assert plain.prefill.seconds.tolist() == [0.09, 0.092, 0.1]
    assert plain.prefill.configuration.tolist() == [0, 0, 1]
    assert plain.decode.batch.tolist() == [5, 5, 33]
    assert plain.decode.context_tokens.tolist() == [5 * 1536, 5 * 1536, 33 * 8200]
    # Four others' prompts fall on 1,024 steps; 32 prompts on 16 steps make every step a prefill of two.
    assert plain.decode.prefill_share.tolist() == [4 / 1024, 4 / 1024, 1]
    assert plain.decode.prefill_tokens.tolist() == [1024, 1024, 2 * 8192]


def test_splitwise_rows_become_points(tmp_path: Path) -> None:
    file = tmp_path / "perf.csv"
    file.write_text(
        "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,tensor_parallel\n"
        "llama2-70b,a100-80gb,512,4,128,200,50,5000,8\n"
        "llama2-70b,a100-80gb,512,64,128,800,70,9000,8\n"
        "llama2-70b,a100-80gb,512,64,128,800,70,9000,2\n"
    )
    (points,) = read_splitwise(file)
    assert points.setting.tensor_parallel == 8
    assert points.prefill.tokens.tolist() == [2048]  # 32k tokens are more than a step takes
    assert points.decode.context_tokens.tolist() == pytest.approx([4 * (512 + 50), 64 * (512 + 9000 / 70 / 2)])
    assert points.decode.seconds.tolist() == [0.05, 0.07]


def test_blis_coefficients_become_profiles_and_unfinished_rows_do_not(tmp_path: Path) -> None:
    file = tmp_path / "blis.csv"
    file.write_text(
        "model,gpu,tp,vllm_version,alpha0_us,beta0_us,beta1_us_per_prefill_tok,beta2_us_per_decode_tok\n"
        "m,H100,2,v0.8.4,1,8000,20,5\n"
        "broken,H100,1,v0.8.4,250.0\n"
    )
    (only,) = read_blis(file)
    assert only.profile.step_time_s(1000, 0, 0) == pytest.approx(0.028)
    assert only.profile.step_time_s(0, 10, 99_999) == pytest.approx(0.00805)
    assert only.prefill_error is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,h,vllm,fp8,agg,x,1024,5,4,1,1,90,10", r"line 2, column isl: 'x' is not a number"),
        ("m,h,vllm,fp8,agg,1024,1024,5,4,1,1,nan,10", r"line 2, column silicon_ttft_ms: 'nan' is not a number from 0"),
        ("m,h,vllm,fp8,agg,1024,1024,5,4,1,1,90,0", r"line 2, column silicon_tpot_ms: is 0"),
        ("m,h,vllm,fp8,agg,1024,1024,5", r"line 2: 8 values under a header of 13 columns"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_silicon(silicon(tmp_path, row))


def test_series_that_cannot_be_fitted_say_why(tmp_path: Path) -> None:
    fits, failed = fit_all(read_silicon(silicon(tmp_path, "m,h,vllm,fp8,agg,1024,1024,5,4,1,1,90,10")))
    assert not fits
    assert list(failed.values()) == ["prefill was measured at 1 prompt length(s); at least 2 are needed"]


def test_the_published_silicon_measurements_fit() -> None:
    """The held-out errors of series measured with vLLM, as stated in docs/plan/simulation.md."""
    folder = os.environ.get("PROFILE_DATA_DIR", "")
    file = Path(folder) / "silicon_sample.csv"
    if not folder or not file.exists():
        pytest.skip("PROFILE_DATA_DIR names no folder with silicon_sample.csv (NVIDIA aiconfigurator)")
    fits, _ = fit_all([one for one in read_silicon(file) if one.setting.variant.startswith("vllm fp8")])
    held = [fit for fit in fits if fit.configurations >= 8]
    assert len(held) >= 20
    assert median(fit.prefill_error.held_out_median_pct for fit in held) < 10
    assert median(fit.decode_error.held_out_median_pct for fit in held) < 10
