"""Faults of images on their way in: files, requests, other machines, the chat page."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

_FILES = "tests/test_images.py"
_READING = "tests/server/test_pictures.py"
_DIALECTS = "tests/server/dialects/test_images.py"
_REMOTE = "tests/server/test_remote_images.py"
_PAGE = "tests/server/test_page_images.py"

FAULTS = [
    Fault("a digest forgets the size of the picture", "images.py", 'f"{height}x{width}:".encode()', 'b""', _FILES),
    Fault("pixels of a picture can be changed", "images.py", "kept.flags.writeable = False", "pass", _FILES),
    Fault("an image file has no limit", "images.py", "if len(data) > limits.bytes:", "if False:", _FILES),
    Fault("an image has no limit of pixels", "images.py", "if width * height > limits.pixels:", "if False:", _FILES),
    Fault(
        "an image is decoded before its size is looked at",
        "images.py",
        "        _check(image, limits)\n        image.load()",
        "        image.load()\n        _check(image, limits)",
        _FILES,
    ),
    Fault("of an animation any frame is shown", "images.py", "    if frames > 1:", "    if False:", _FILES),
    Fault("photographs lie on their side", "images.py", "6: Transpose.ROTATE_270,", "6: Transpose.ROTATE_90,", _FILES),
    Fault(
        "what is transparent shows what was never seen",
        "images.py",
        "if not image.has_transparency_data:",
        "if True:",
        _FILES,
    ),
    Fault("16 bits of grey are cut off", "images.py", "(np.asarray(image) >> 8)", "np.clip(image, 0, 255)", _FILES),
    Fault(
        "a damaged file breaks the server",
        "images.py",
        "except Exception as error:  # decoders raise",
        "except OSError as error:  # decoders raise",
        _FILES,
    ),
    Fault(
        "instructions may show images",
        "server/dialects/conversation.py",
        "if isinstance(piece, ImageSource):\n            raise",
        "if False:\n            raise",
        _DIALECTS,
    ),
    Fault(
        "images come before all text",
        "server/dialects/conversation.py",
        "groupby(pieces, key=lambda piece: isinstance(piece, ImageSource)):",
        "groupby(sorted(pieces, key=lambda piece: isinstance(piece, str)), lambda piece: not isinstance(piece, str)):",
        _DIALECTS,
    ),
    Fault(
        "results of tools show nothing",
        "server/dialects/openai_chat.py",
        'read = content_of if role in ("user", "tool") else text_of',
        'read = content_of if role == "user" else text_of',
        _DIALECTS,
    ),
    Fault(
        "an image stands in the log",
        "server/jobs.py",
        "url: str = field(repr=False)",
        "url: str",
        _DIALECTS,
    ),
    Fault(
        "a stored file is nobody's fault",
        "server/dialects/images.py",
        "    if stored:",
        "    if False:",
        _DIALECTS,
    ),
    Fault("a blind model is shown images", "server/pictures.py", "        if blind:", "        if False:", _READING),
    Fault(
        "a request shows any number of images",
        "server/pictures.py",
        "        at_most(sources, self._settings.max_images,",
        "        at_most(sources, 10**9,",
        _READING,
    ),
    Fault(
        "images are large together",
        "server/pictures.py",
        "pixels += picture.rgb.size // 3",
        "pixels = picture.rgb.size // 3",
        _READING,
    ),
    Fault(
        "an image is read on the event loop",
        "server/pictures.py",
        "return await asyncio.to_thread(self._read, file)",
        "return self._read(file)",
        _READING,
    ),
    Fault("any number of images is read at once", "server/pictures.py", "_AT_ONCE = 2", "_AT_ONCE = 99", _READING),
    Fault("what is no base64 is read", "server/pictures.py", "validate=True", "validate=False", _READING),
    Fault(
        "images are fetched unasked",
        "server/pictures.py",
        "if settings.remote_images else None",
        "if True else None",
        _READING,
    ),
    Fault(
        "any address is asked",
        "server/remote_images.py",
        "if not addresses or not all(map(is_public, addresses)):",
        "if not addresses:",
        _REMOTE,
    ),
    Fault(
        "one public address stands for the others",
        "server/remote_images.py",
        "not all(map(is_public, addresses))",
        "not any(map(is_public, addresses))",
        _REMOTE,
    ),
    Fault("a group of hosts is asked", "server/remote_images.py", "and not found.is_multicast", "", _REMOTE),
    Fault(
        "IPv6 hides an address of IPv4",
        "server/remote_images.py",
        "found not in _IPV6_HOSTS or",
        "",
        _REMOTE,
    ),
    Fault(
        "a tunnel leads back in",
        "server/remote_images.py",
        "any(found in tunnel for tunnel in _IPV6_TUNNELS)",
        "False",
        _REMOTE,
    ),
    Fault(
        "a name is resolved again",
        "server/remote_images.py",
        "return await self._connect(address, place.port, **secure)",
        "return await self._connect(place.host, place.port, **secure)",
        _REMOTE,
    ),
    Fault(
        "a certificate of the address is asked for",
        "server/remote_images.py",
        '"server_hostname": place.host}',
        '"server_hostname": addresses[0]}',
        _REMOTE,
    ),
    Fault("any port is asked", "server/remote_images.py", "if port not in _PORTS.values():", "if False:", _REMOTE),
    Fault("a password is sent", "server/remote_images.py", 'if "@" in parts.netloc:', "if False:", _REMOTE),
    Fault(
        "a redirect is an image",
        "server/remote_images.py",
        "if response.status_code != 200:",
        "if response.status_code >= 400:",
        _REMOTE,
    ),
    Fault("a fetched file has no limit", "server/remote_images.py", "if len(body) > self._most:", "if False:", _REMOTE),
    Fault(
        "a fetched file may take for ever",
        "server/remote_images.py",
        "async with asyncio.timeout(self._seconds):",
        "if True:",
        f"{_REMOTE} -k too_long",
    ),
    Fault(
        "any number of files is fetched at once",
        "server/remote_images.py",
        "async with self._places:",
        "if True:",
        _REMOTE,
    ),
    Fault(
        "a line break in an address is a header",
        "server/remote_images.py",
        "if not _PRINTABLE.fullmatch(url):",
        "if not _PRINTABLE.match(url):",
        _REMOTE,
    ),
    Fault(
        "the page offers images to a model that reads text",
        "server/page/static/app.js",
        'attachments.allow(Boolean(model?.architecture?.input_modalities?.includes("image")));',
        "attachments.allow(true);",
        f"{_PAGE}::test_nothing_is_offered_to_a_model_that_reads_text",
    ),
    Fault(
        "an edited message loses its images",
        "server/page/static/app.js",
        "say(chats.current, text, images);",
        "say(chats.current, text);",
        f"{_PAGE}::test_an_edited_message_keeps_its_images",
    ),
    Fault(
        "a copied text is pasted as a picture of itself",
        "server/page/static/attach.js",
        ' || types.includes("text/plain")) return;',
        ") return;",
        f"{_PAGE}::test_text_that_comes_with_a_picture_of_itself_is_text",
    ),
    Fault(
        "images of deleted chats stay in the browser",
        "server/page/static/app.js",
        "keepOnly(chats.pictures());",
        "",
        f"{_PAGE}::test_images_of_deleted_chats_are_forgotten",
    ),
]
