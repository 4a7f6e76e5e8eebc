"""The parser of kernels' structs. tests/cuda/test_compile.py has the compiler check what it finds in every source."""

import pytest

from moeblaze_cupy.cuda import structs as params

SOURCE = """
template <class T, class W>
struct ScaleParams {
#if MAPPED
    TensorMap a;  // (n,) T, in: int wrong;
#endif
#if !MAPPED
    const T* a;  // (n,) T, in
#endif
    const W *b, *c;  // (n,) W, in
#if SCALES
    float* scales;  // (n,) fp32, out
#endif
    int64 ld;
    int rows, columns;
    ACTIVATION_CONSTANTS
};
struct MisorderedParams {
    int n;
    float* out;  // (n,) fp32, out
};
#define SCALE_ENTRY(NAME, T, W) \\
    extern "C" __global__ void __launch_bounds__(32 * 2) NAME(const ScaleParams<T, W> p) { scale(p); }
#define SCALE_ENTRIES(SUFFIX, T) SCALE_ENTRY(scale_##SUFFIX, T, float)
SCALE_ENTRIES(float32, float)
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "scale.cu").write_text(SOURCE)
    monkeypatch.setattr(params, "source_folder", lambda: str(tmp_path))
    yield "scale.cu"
    params._code.cache_clear()  # of a folder that is gone


def test_fields_follow_the_macros(source):
    plain = params._struct(source, "ScaleParams", {"MAPPED": "0", "SCALES": "0"})
    assert plain == params.Params(
        "ScaleParams<float, float>", pointers=("a", "b", "c"), int64=("ld",), int32=("rows", "columns")
    )
    mapped = params._struct(source, "ScaleParams", {"MAPPED": "1", "SCALES": "1", "CONSTANTS": "2"})
    assert (mapped.maps, mapped.pointers) == (("a",), ("b", "c", "scales"))
    assert mapped.float32 == ("constant0", "constant1")
    assert [field.offset for field in mapped.fields] == [0, 128, 136, 144, 152, 160, 164, 168, 172]
    assert mapped.size == 192  # a multiple of a map's alignment


def test_a_macros_calls_name_the_kernels(source):
    assert params._entries(source) == {"scale_": "ScaleParams"}
    params._entries.cache_clear()


def test_other_orders_are_refused(source):
    with pytest.raises(ValueError, match=r"scale\.cu: MisorderedParams: expected fields in the order maps, pointers"):
        params._struct(source, "MisorderedParams", {})
