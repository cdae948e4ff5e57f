"""Commands memory and tune from a shell's view: errors before compiling, tables, JSON, pictures and the page."""
import builtins
import html.parser
import json
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import pytest
import yaml

from linen_stack import commands
from linen_stack.commands import memory as memory_command, used
from linen_stack.inspect import chips, html as html_lib, render
from tests.test_tune import made_up

tune_lib = __import__("linen_stack.inspect.tune", fromlist=["search"])

CONFIG = {
    "model": {"vocab": 64, "embed": 16, "family": "decoder", "args": {"mlp": 32, "num_heads": 2}, "num_layers": 4},
    "stack": {"remat": "full"}, "train": {"batch": 8, "seq": 8}}


@pytest.fixture
def config(tmp_path):
  path = tmp_path / "small.yml"
  path.write_text(yaml.safe_dump(CONFIG))
  return str(path)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
  """A compiler by whose word each policy takes what it keeps; returns the policies that it was given."""
  given = []

  def compile_report(program, topology, **options):
    assert options["limit"] > 0
    given.append(program.remat)
    kept = program.residuals()
    size = 2**20 + kept.total("device")
    too_large = "total memory required for HLO temporaries (99.00G) exceeds available HBM" if size > 2**20 + 120_000 else None
    report = made_up(size, kept.total("host"), topology, too_large)
    return memory_command.dataclasses.replace(report, cost=program.cost(program.trace(), topology.chip), seconds=12.0)

  monkeypatch.setattr(memory_command, "compile_report", compile_report)
  monkeypatch.setattr(tune_lib, "compile_report", compile_report)
  return given


def run(capsys, *argv):
  status = commands.main(argv)
  out, err = capsys.readouterr()
  return status, out, err


@pytest.mark.parametrize("flags, words", [
    ((), "needs --topology; some that there are: v2:2x2"),
    (("--topology", "v5z:2x2"), "no TPU generation 'v5z'"),
    (("--topology", "v5e:2x2x2"), "v5e has 2 dimensions"),
    (("--topology", "v5e:4x4"), "batch of 8 sequences, of shape [8, 9]: dimension 0 of 8 does not divide among 16 devices"),
    (("--topology", "v5e:2x2", "--batch", "3"), "take a multiple of 4"),
    (("--topology", "v5e:2x2", "--set", "mesh.axes={fsdp: 3}"), "mesh (fsdp: 3) has 3 devices, but v5e:2x2 has 4"),
    (("--topology", "v5e:2x2", "--set", "mesh.rules={embed: model}"), "mesh.rules.embed: 'model' is no axis"),
    (("--topology", "v5e:2x2", "--set", "model.embed=18", "--set", "model.args.num_heads=1"),
     "dimension 1 of 18 does not divide among 4 devices"),
    (("--topology", "v5e:2x2", "--set", "stack.remat={save: [query_pro]}"), "did you mean 'query_proj'"),
])
@pytest.mark.parametrize("command", ["memory", "tune"])
def test_errors_before_compiling(capsys, config, compiler, command, flags, words):
  status, out, err = run(capsys, command, config, *flags)
  assert status in (1, 2) and not out and not compiler
  assert words in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("command, flags, words", [
    ("memory", ("--policies", "full,minimall"), "no preset 'minimall'; did you mean 'minimal'"),
    ("memory", ("--html", "page.txt"), "the name must end in .html or .htm"),
    ("memory", ("--html", "/no/such/folder/page.html"), "--html /no/such/folder/page.html: there is no folder /no/such/folder"),
    ("memory", ("--plot", "/dev/null/plot.svg"), "--plot /dev/null/plot.svg: there is no folder /dev/null"),
    ("memory", ("--plot", "plot.pdf"), "the name must end in .svg or .png"),
    ("tune", ("--hbm", "15"), "--hbm: '15' has no unit; write 15GiB"),
    ("tune", ("--host", "64GX"), "--host: no unit 'GX'"),
    ("tune", ("--hbn", "15GiB"), "no flag --hbn; did you mean 'hbm'"),
])
def test_flags_that_cannot_be(capsys, config, compiler, command, flags, words):
  status, _, err = run(capsys, command, config, "--topology", "v5e:2x2", *flags)
  assert status in (1, 2) and words in err and not compiler


def test_accelerators_are_left_alone(capsys, config):
  jax.config.update("jax_platforms", "cpu,tpu")
  run(capsys, "memory", config, "--topology", "v9:2x2")
  assert jax.config.jax_platforms == "cpu"


def test_folders_are_no_files(capsys, config, tmp_path):
  (tmp_path / "page.html").mkdir()
  status, _, err = run(capsys, "memory", config, "--topology", "v5e:2x2", "--html", str(tmp_path / "page.html"))
  assert status == 1 and "this is a folder" in err


def test_png_without_matplotlib(capsys, config, monkeypatch, tmp_path):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name.split(".")[0] == "matplotlib":
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", without)
  status, _, err = run(capsys, "memory", config, "--topology", "v5e:2x2", "--plot", str(tmp_path / "x.png"))
  assert status == 1 and "pip install 'linen_stack[plot]'" in err


def test_the_configs_own_policy(capsys, config, compiler):
  status, out, err = run(capsys, "memory", config, "--topology", "v5e:2x2")
  assert status == 0 and compiler == [None]
  assert "as configured" in out and "1/1 as configured: " in err
  assert "v5e:2x2: 4 devices of 15.8 GiB; batch 8, seq 8" in out


class Page(html.parser.HTMLParser):
  """What a page holds: tags that are open, and its text."""

  def __init__(self, text):
    super().__init__()
    self.open, self.words, self.loads, self.count = [], [], [], {}
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.count[tag] = self.count.get(tag, 0) + 1
    self.loads += [value for name, value in attrs if name in ("src", "href")]
    if tag not in ("meta", "path", "circle", "rect", "br"):
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.count[tag] = self.count.get(tag, 0) + 1

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data)


def test_policies_as_table_json_picture_and_page(capsys, config, tmp_path):
  page, plot = tmp_path / "page.html", tmp_path / "plot.svg"
  names = ["none", "full", "minimal", "qkv_proj_offloaded"]
  status, out, err = run(capsys, "memory", config, "--topology", "v5p:2x2x1", "--policies", ",".join(names), "--json",
                         "--html", str(page), "--plot", str(plot))
  assert status == 0, err
  said = json.loads(out)
  rows = {row["policy"]: row for row in said["policies"]}
  assert list(rows) == names and (said["devices"], said["batch"], said["seq"]) == (4, 8, 8)
  assert rows["full"]["recomputed_flops"] > rows["minimal"]["recomputed_flops"] > rows["none"]["recomputed_flops"] == 0
  assert rows["minimal"]["kept_device"] > rows["full"]["kept_device"]
  assert rows["qkv_proj_offloaded"]["kept_host"] > 0 == rows["minimal"]["kept_host"]
  assert not rows["none"]["compiled"]["fits"] and rows["none"]["compiled"]["hbm"] == 99 * 2**30
  assert all(row["seconds"] > 0 for row in rows.values())
  # The picture is a drawing with a dot for each policy; the page needs nothing beside itself.
  root = xml.etree.ElementTree.fromstring(plot.read_text())
  assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 4
  found = Page(page.read_text())
  assert not found.open and not found.loads and found.count["svg"] == 1 and found.count["tr"] == 5
  for name in (*names, "query_proj", "carry", "layers: 4 layers", "at least 99.0 GiB"):
    assert any(name in word for word in found.words), name
  assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "plot.svg", "small.yml"]


def test_the_table(capsys, config):
  status, out, _ = run(capsys, "memory", config, "--topology", "v5p:2x2x1", "--policies", "none,full", "--batch", "16")
  assert status == 0 and "batch 16" in out
  head, none, full = (line for line in out.splitlines() if line.startswith(("policy", "none", "full")))
  for name in ("HBM", "of device", "host", "recomputed FLOPs", "est. step", "compiled in"):
    assert name in head
  assert ">= 99.0 GiB" in none and "too much" in none and "12 s" in full and "%" in full


def test_all_leaves_out_what_the_model_has_no_names_for(capsys, config, monkeypatch):
  monkeypatch.setattr(memory_command, "PRESETS", {name: memory_command.PRESETS[name] for name in ("full", "save_out_proj")})
  monkeypatch.setattr(memory_command.compiled.Subject, "check", lambda self, policy: (
      "none of its names" if policy.names else None))
  status, out, err = run(capsys, "memory", config, "--topology", "v5p:2x2x1", "--policies", "all")
  assert status == 0 and "left out: save_out_proj: none of its names" in err and "save_out_proj" not in out
  status, _, err = run(capsys, "memory", config, "--topology", "v5p:2x2x1", "--policies", "save_out_proj")
  assert status == 1 and "policy save_out_proj: none of its names" in err


def test_tune(capsys, config, compiler):
  status, out, err = run(capsys, "tune", config, "--topology", "v5p:2x2x1", "--hbm", "1.08MiB")
  assert status == 0, err
  assert "winner: full" not in out and "winner: " in out and "stack:\n  remat:" in out and "compiling full" in err and 1 < len(compiler) <= 4
  status, out, err = run(capsys, "tune", config, "--topology", "v5p:2x2x1", "--hbm", "1MiB", "--json")
  assert status == 1 and "no policy fits" in err and json.loads(out)["winner"] is None
  assert json.loads(out)["smallest_hbm"] > 2**20


# Memory that training took ------------------------------------------------------------------------------------------------


def test_memory_in_use_is_told_beside_what_the_compiler_says(monkeypatch):
  x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  compiled = jax.jit(lambda x: (x @ x) @ x).lower(x).compile()
  size = 256 * 256 * 4
  assert 2 * size <= used.expected(compiled) <= 5 * size
  most, where = used.peak()
  assert most > 2**25 and where == "by the whole process, on cpu"
  line = used.describe(compiled)
  assert line.startswith("memory: at most ") and f"takes {render.size(used.expected(compiled))}, as the compiler" in line

  class Device:
    device_kind, platform = "A GPU", "gpu"

    def memory_stats(self):
      return {"peak_bytes_in_use": 3 * 2**30}

  monkeypatch.setattr(used.jax, "local_devices", lambda: [Device()])
  assert used.describe(compiled).startswith("memory: at most 3.0 GiB were in use on A GPU; a step")


# Pictures ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [
    [], [("minimal_with_context_and_quantization", 2**30, 0.01, True)], [(f"policy {i}", i * 2**28, 0.01 + i * 1e-5, i < 9) for i in range(16)],
    [("fast & <small>", 2**20, 1e-6, True), ("slow", 2**40, 10.0, False)]], ids=len)
def test_charts_of_any_points(points):
  root = xml.etree.ElementTree.fromstring(html_lib.chart(points, 16 * 2**30))
  width, height = float(root.get("width")), float(root.get("height"))
  dots = list(root.iter("{http://www.w3.org/2000/svg}circle"))
  assert len(dots) == len(points)
  for dot in dots:
    assert 0 <= float(dot.get("cx")) <= width and 0 <= float(dot.get("cy")) <= height
  texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
  # No label is cut off: letters are six units wide on average.
  assert all(float(text.get("x")) + 6 * len(text.text) <= width for text in texts if text.get("x") and not text.get("text-anchor"))
  labels = sorted(float(text.get("y")) for text in texts if text.text in [point[0] for point in points])
  assert len(labels) == len(points)
  assert all(later - earlier > 13 for earlier, later in zip(labels, labels[1:])) and all(y < height for y in labels)


def test_png(tmp_path):
  pytest.importorskip("matplotlib")
  path = tmp_path / "plot.png"
  html_lib.png(str(path), [("one", 2**30, 0.01, True), ("two", 2**35, 0.02, False)], chips.CHIPS["v5e"].hbm)
  assert path.read_bytes().startswith(b"\x89PNG")
