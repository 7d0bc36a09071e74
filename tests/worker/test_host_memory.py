"""How much memory is left, by kernel and container."""

from worker.host_memory import available_memory_bytes


def test_memory_heeds_the_containers_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert available_memory_bytes(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1000
