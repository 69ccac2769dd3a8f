"""Judge docstrings by rule: sentences that must not return, fragments of `Args:`, first words that are no verb.

`python -m tests.ci.words [SEED]` prints 30 docstrings drawn by the seed (default: today) for a person to read aloud.
"""

from __future__ import annotations

import ast
import datetime
import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("conf", "etl", "training", "pipelines", "sparkring", "extras")  # sparkring's links are not followed
Function = ast.FunctionDef | ast.AsyncFunctionDef

GONE = (  # sentences of this code that had to be decoded
    "Begin to train at `begun`",
    "hear of each that is committed",
    "who has no gradient to give until it is known",
    "without the meaning that no further attempt is wanted",
    "Notice what no message tells",
    "asked all at once and heard one after the other",
    "else nothing else may make them, either",
    "this one speaks for them",
    "those of a run without lag are none",
    "The names of the labels of which a row may have several",
    "The label whose values are texts, or arrays of them",
    "Count the units from the one that 1970 begins in",
    "For how long a lease must stay as it is before it may be taken",
    "ConfigError for one that there is not",
    "one that the collector refuses for what it is",
    "What of the recipe this dataset cannot meet",
    "whose end the deadline is counted from",
    "What of a URL that is a secret must not be shown",
    "Bytes per rank of the all-reduces that keep a weight of two stages one",
    "Folder and name of the file for the block, and what it is of",
    "where a shard begins among rows of one hash, each such row's place",
    "Of each: (rank, its busy s a step",
    "the one that it is in begins",
    "A worker's gradient of one clock",
    "which is done with all but the last",
    "What the ranks of a run do when they meet",
    "and by rank 0 what they are",
    "With what a host was started that came by itself",
    "The callback of who gave none",
    "what is said of values that are not there",
    "strangers are sent away",
    "dealt like hands of cards",
    "say to each other",
)
TICS = re.compile(r"\b(said|told|who(?:ever)? gave|of one's own|there is none|as it stands|whoever|bites|unheard)\b")

VERBS = frozenset(  # in the imperative; a new one is added here
    re.findall(
        r"\S+",
        """
Abort Accept Accumulate Acquire Activate Adapt Add Adjust Advance Aggregate Agree Align Allocate Allow Analyze Answer
Append Apply Arrange Ask Assemble Assign Attach Average Await Be Begin Blend Bound Bring Broadcast Build Calibrate
Call Cancel Change Check Choose Classify Clip Clone Close Code Collect Combine Commit Compare Compile Complete Compute
Concatenate Configure Confirm Connect Consume Continue Convert Copy Count Create Cross-validate Cut Decide Declare
Decode Decorate Decrypt Delete Deliver Deny Deploy Derive Describe Destroy Detach Detect Disable Divide Do Double
Download Draw Drop Elect Emit Enable Enclose Encode Encrypt End Ensure Enter Enumerate Erase Escape Estimate Evaluate
Evict Examine Exchange Exclude Execute Expand Explain Export Extend Extract Fail Fetch Fill Filter Find Finish Fit
Flatten Flush Fold Follow Forget Fork Form Format Free Gather Generate Give Go Group Grow Halve Hand Handle Hash Have
Hide Hold Identify Ignore Import Include Increase Infer Inform Inherit Initialize Inject Insert Inspect Install
Interpolate Interrupt Invert Invoke Isolate Iterate Join Judge Keep Kill Learn Leave Let Limit Line Link List Listen
Load Localize Locate Lock Log Look Make Map Mark Match Measure Meet Merge Migrate Minimize Mix Modify Mount Move
Multiply Name Normalize Note Notify Obtain Offer Omit Open Order Orthonormalize Overwrite Pack Pad Pair Parse
Partition Pass Pause Permute Persist Pick Pickle Pin Place Plan Play Point Poll Pop Predict Prefix Prepare Preserve
Print Promote Propagate Protect Prove Provide Prune Publish Pull Push Put Quantize Queue Quote Raise Randomize Rank
Read Rebuild Receive Recognize Recompute Reconnect Reconstruct Record Recover Redact Reduce Refresh Refuse Register
Rehash Reject Release Reload Remove Rename Render Renew Reorder Repair Repeat Replace Replay Report Reproduce Request
Require Reserve Reset Reshape Resolve Restore Resume Retain Retire Retrieve Retry Return Reuse Reverse Revert Rewind
Rewrite Rotate Round Route Run Sample Sanitize Satisfy Save Say Scale Score Search See Seed Select Send Serialize
Serve Set Shard Shorten Show Shrink Simulate Skip Sleep Slice Sort Spawn Specify Split Spread Stack Start Step Stop
Store Strip Submit Subscribe Substitute Subtract Suggest Sum Summarize Suspend Swap Switch Synchronize Take Tell
Terminate Thin Time Toggle Tokenize Trace Track Train Transform Translate Traverse Trim Truncate Try Turn Undo Unify
Unlock Unpack Unregister Unwrap Update Upload Use Validate Verify View Wait Wake Warn Watch Weigh Wrap Write Yield Zip
""",
    )
)
BEFORE_OF = {"Warn", "Say"}  # other verbs before `of` or `per` are nouns: "Number of rows"
ENTRY = re.compile(r"( +)\*{0,2}\w+(?:, \w+)*(?: \([^)]*\))?: (.*)")
SECTION = re.compile(r"(Returns|Raises|Yields):$")
FRAGMENT = re.compile(r"(of|whose|as|that|where|in)\b")
FEWEST_WORDS = 3


def standing(text: str) -> list[str]:
    """List the sentences that must not return, and lines with a tic, that stand in a text."""
    flat = re.sub(r"\s+(?:# )?", " ", text)
    return [each for each in GONE if each in flat] + [line.strip() for line in text.splitlines() if TICS.search(line)]


def fragments(docstring: str) -> list[str]:
    """List the entries of an `Args:` section that are no phrases."""
    return [entry for entry in entries(docstring) if FRAGMENT.match(entry) or len(entry.split()) < FEWEST_WORDS]


def entries(docstring: str) -> Iterator[str]:
    """Yield the description of each parameter in an `Args:` section, with its further lines."""
    lines = docstring.partition("Args:\n")[2].splitlines()
    found = ""
    for line in lines:
        if not line.strip() or SECTION.match(line):
            break
        if entry := ENTRY.fullmatch(line) if not line.startswith(" " * 8) else None:
            yield from filter(None, [found])
            found = entry[2]
        else:
            found += " " + line.strip()
    yield from filter(None, [found])


def lacks_verb(docstring: str) -> bool:
    """Return whether a docstring does not begin with a verb in the imperative."""
    first, *others = docstring.split()
    verb = re.match(r"[\w-]*", first)[0]  # type: ignore[index]
    return verb not in VERBS or (first == verb and others[:1] in (["of"], ["per"]) and verb not in BEFORE_OF)


def is_property(function: Function) -> bool:
    return any("property" in ast.unparse(each) for each in function.decorator_list)


def files() -> list[Path]:
    """List the Python files of the code."""
    links = {path for path in (ROOT / "sparkring").iterdir() if path.is_symlink()}
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in found if links.isdisjoint(path.parents))


@cache
def docstrings() -> list[tuple[str, Function, str]]:
    """List (`file:line`, function, docstring) of every function with a docstring."""
    nodes = ((path, node) for path in files() for node in ast.walk(ast.parse(path.read_text())))
    functions = ((path, node, ast.get_docstring(node)) for path, node in nodes if isinstance(node, Function))
    return [(f"{path.relative_to(ROOT)}:{node.lineno}", node, text) for path, node, text in functions if text]


def main(seed: str) -> None:
    """Print 30 docstrings to read aloud."""
    for place, function, text in random.Random(seed).sample(docstrings(), 30):
        print(f"{place} {function.name}: {text.splitlines()[0]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(datetime.date.today()))
